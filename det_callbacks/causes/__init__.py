"""Why two runs differ: a walk from the first difference to its root,
and what a root of each kind means.
"""
