"""What one run shows is wrong, although it repeats: a file for each finding, their order in ``table.py``."""
