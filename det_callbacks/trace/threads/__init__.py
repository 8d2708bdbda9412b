"""Modules that a step runs in other threads."""
