"""Kinds of tensors and dtypes that torch warns of when one is made,
and that are digested all the same.
"""

import pytest

BETA_TENSORS = pytest.mark.filterwarnings(
    "ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta:UserWarning",
    "ignore:The PyTorch API of nested tensors:UserWarning",  # a prototype
    "ignore:torch.quantize_per_tensor.*deprecated:UserWarning",
    # said by torch 2.11 and 2.12 also where these checks are asked for
    "ignore:Sparse invariant checks are implicitly disabled:UserWarning",
)

# said once a process: of complex32, and of bcomplex32, which came with torch 2.14
BETA_DTYPES = pytest.mark.filterwarnings(
    "ignore:B?Complex(Half|32) support is experimental:UserWarning"
)
