"""Observations: values that a model or script records by name, with or without a Trainer."""
