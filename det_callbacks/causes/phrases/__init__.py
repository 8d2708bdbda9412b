"""Wording that several rules share."""
