"""Torch tensors as the numpy arrays that compiled kernels read and write, without a copy."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def as_array(tensor: Tensor) -> NDArray[Any]:
    """The tensor's memory as an array; bfloat16, which numpy lacks, as its 16 bits in uint16."""
    if tensor.dtype == torch.bfloat16:
        array: NDArray[np.uint16] = tensor.view(torch.uint16).numpy()
        return array
    return tensor.numpy()
