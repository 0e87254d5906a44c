"""Manifests in the formats that trainers read."""
