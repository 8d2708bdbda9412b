"""Facts about this process and machine that can change a run's bits: packages,
settings, generators.
"""
