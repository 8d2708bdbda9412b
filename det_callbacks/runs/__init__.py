"""Recorded runs: what one holds, how it is written and how it is opened again; without torch."""
