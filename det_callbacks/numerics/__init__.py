"""Measures by how much two modules differ that should compute the same,
such as eager and compiled.
"""
