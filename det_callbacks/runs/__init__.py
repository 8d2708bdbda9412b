"""Recorded runs: what they hold, how they are written and read; without torch."""
