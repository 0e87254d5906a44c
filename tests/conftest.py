"""Puts tests/ on the path: what several test folders share lies beside this file."""
