"""A weight matrix in the layout that this machine multiplies fastest."""

import torch
from torch import Tensor
from torch.nn.functional import linear


class Linear:
    """y = x W^T + b for ``weight`` [out, in] and x [N, in], contiguous, in the weight's dtype.

    bfloat16 weights are packed once into oneDNN's blocked layout where the processor multiplies bfloat16: at one row,
    where the product is bound by reading the weight, matrices of 576 x 576 to 1536 x 576 were read 1.3 to 1.4 times as
    fast as in the plain layout (Sapphire Rapids, 2 cores) and larger ones alike. float32 stays plain.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._packed = weight.dtype == torch.bfloat16 and multiplies_bfloat16()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if not self._packed:
            return linear(x, self._weight, self._bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out


def multiplies_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 natively on this processor.

    The two operators above are what torch's own compiler emits, and in no documented interface: hence the look.
    """
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return (
        available
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
