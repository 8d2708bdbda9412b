"""Regions compiled by ``torch.compile``, and CUDA graphs."""
