"""Why two runs differ: a file for each rule, their order in ``table.py``, and shared wording in ``phrases/``."""
