"""A weight matrix in the layout that this machine multiplies fastest."""

import torch
from torch import Tensor
from torch.nn.functional import linear


class Linear:
    """y = x W^T + b for ``weight`` [out, in]. x is [N, in], contiguous, in the weight's dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
