"""What one run tells by itself, reproducible and wrong: a file for each finding, their order in ``table.py``."""
