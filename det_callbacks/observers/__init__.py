"""Observations: what a model or a script wants recorded by name, with or without a Trainer."""
