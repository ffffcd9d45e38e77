"""Torch tensors as the numpy arrays that compiled kernels read and write, without a copy."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_KEPT = "_biphase_array"


def as_array(tensor: Tensor) -> NDArray[Any]:
    """The tensor's memory as an array; bfloat16, which numpy lacks, as its 16 bits in uint16."""
    kept: NDArray[Any] | None = getattr(tensor, _KEPT, None)
    if kept is not None:
        return kept
    if tensor.dtype == torch.bfloat16:
        array: NDArray[np.uint16] = tensor.view(torch.uint16).numpy()
        return array
    return tensor.numpy()


def keep_array(tensor: Tensor) -> Tensor:
    """Make the array of a tensor that lives as long as the model once, not at each of the hundreds of calls of a step.

    A step of one row converts some 400 tensors, at 1 to 4 microseconds each.
    """
    setattr(tensor, _KEPT, as_array(tensor))
    return tensor
