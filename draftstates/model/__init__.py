"""The target model's folder on the disk."""
