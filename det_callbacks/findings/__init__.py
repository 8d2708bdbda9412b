"""Mistakes that a single run reveals, although it is reproducible: a file for each,
their order in ``table.py``.
"""
