"""The textbook's model: a number of parameters, all of which every token multiplies and every step reads.

It knows no embedding, no norm and no head of its own; an exact shape differs by a few per cent (docs/roofline.md).
"""

import math

from biphase.errors import BadInput
from biphase.roofline.architecture import Architecture, Attention, Layer, Matrix, Operator
from biphase.roofline.formats import BF16, Format


def textbook(
    parameters: int,
    *,
    layers: int = 32,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    form: Format = BF16,
) -> Architecture:
    """A model of ``parameters`` weights and the attention of ``layers`` layers; the defaults are an 8B Llama's."""
    if min(parameters, layers, heads, kv_heads, head_dim) < 1:
        raise BadInput("a model needs at least one parameter, layer, head and head dimension")
    width = heads * head_dim
    inputs = math.gcd(parameters, width)
    block = Operator("all", (Matrix("all", inputs, parameters // inputs, form, pieces=heads),))
    attention = Attention(heads, kv_heads, head_dim)
    first = Layer(attention, (block,))
    rest = (Layer(attention, ()),) * (layers - 1)
    nothing = Matrix("none", 0, 0, BF16)
    return Architecture(
        f"textbook {parameters / 1e9:g}B", "textbook", width, 0, (first, *rest), nothing, nothing, True, 0
    )
