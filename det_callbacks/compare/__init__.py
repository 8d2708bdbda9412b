"""Comparing steps and ranks: what differs, where it starts, and which rule names the cause. The judge stands above."""
