"""Whether two samples or batches are the same."""

import numpy as np
import torch


def equal(one, other):
    """Whether two samples or batches are the same, in the types of their containers too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if "float8" in str(one.dtype):  # of which PyTorch compares nothing
            one, other = (tensor.contiguous().view(torch.uint8) for tensor in (one, other))
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other
