"""Regions that ``torch.compile`` compiled, and CUDA graphs."""
