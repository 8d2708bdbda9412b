"""Saved tensors of selected ops: verify restores them (replay),
or compares their numbers (keep_tensors).
"""
