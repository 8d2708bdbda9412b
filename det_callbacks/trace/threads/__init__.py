"""Modules that a step runs in other threads than its own."""
