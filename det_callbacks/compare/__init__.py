"""Compares steps and ranks: what differs and where it starts."""
