"""Runs each op twice on the same inputs, and reports the ops whose bits differ."""
