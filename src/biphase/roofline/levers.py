"""How to beat the decode floor, each way with the number it would give: the only four there are.

A step reads the weights once for everyone in it. So: fewer bytes, more GPUs to read them, more tokens from one read,
more users on one read.
"""

from dataclasses import dataclass, replace

from biphase.errors import BadInput
from biphase.roofline.architecture import Architecture, Experts, Layer, Matrix, Operator
from biphase.roofline.cost import CostModel
from biphase.roofline.execution import Parallelism
from biphase.roofline.formats import FP8, INT4, Format
from biphase.roofline.phases import accepted_tokens, decode, verify
from biphase.roofline.quantization import FormOf, uniform

DRAFTS, ACCEPTANCE = 4, 0.8
USERS = 64


@dataclass(frozen=True)
class Lever:
    """One way, with the step it gives: seconds a token of one user, and tokens a second of all."""

    way: str
    how: str
    token_s: float
    tokens_per_s: float


def levers(model: CostModel, context: int, batch: int, most_users: int | None) -> list[Lever]:
    """All ways that exist here, at ``context`` and from ``batch`` users; ``most_users`` is what the memory holds."""
    found = [_lever("now", "", decode(model, context, batch).seconds, batch)]
    for form in (FP8, INT4):
        smaller = requantized(model.architecture, form)
        if smaller.weight_bytes < 0.9 * model.architecture.weight_bytes:
            step = decode(CostModel(smaller, model.device, model.execution), context, batch)
            found.append(_lever("fewer bytes", f"weights in {form.name}", step.seconds, batch))
    found += _more_gpus(model, context, batch)
    expected = accepted_tokens(DRAFTS, ACCEPTANCE)
    step = verify(model, context, batch, DRAFTS)
    how = f"{DRAFTS} drafts, {ACCEPTANCE:.0%} accepted, drafting free"
    found.append(_lever("more tokens per read", how, step.seconds / expected, batch))
    users = min(USERS, most_users) if most_users is not None else USERS
    if users > batch:
        found.append(_lever("more users per read", f"batch {users}", decode(model, context, users).seconds, users))
    return found


def _more_gpus(model: CostModel, context: int, batch: int) -> list[Lever]:
    parallel = model.execution.parallel
    wider = replace(model.execution, parallel=Parallelism(2 * parallel.tp, parallel.dp, parallel.ep))
    if not model.device.link_gbps:
        return []
    try:
        split = CostModel(model.architecture, model.device, wider)
    except BadInput:  # the heads do not divide: this way does not exist here
        return []
    return [_lever("more GPUs", f"tensor parallel {2 * parallel.tp}", decode(split, context, batch).seconds, batch)]


def _lever(way: str, how: str, seconds: float, batch: int) -> Lever:
    return Lever(way, how, seconds, batch / seconds)


def requantized(architecture: Architecture, form: Format) -> Architecture:
    """The model with every linear layer stored in ``form``; embedding, head and routers stay as they are."""
    chosen = uniform(form).form
    layers = {layer: _layer(layer, chosen, form) for layer, _ in architecture.groups}
    return replace(architecture, layers=tuple(layers[layer] for layer in architecture.layers))


def _layer(layer: Layer, chosen: FormOf, form: Format) -> Layer:
    operators = tuple(_operator(operator, chosen, form) for operator in layer.operators)
    if layer.experts is None:
        return replace(layer, operators=operators)
    inner = tuple(_operator(operator, chosen, form) for operator in layer.experts.operators)
    return replace(layer, operators=operators, experts=Experts(layer.experts.count, layer.experts.chosen, inner))


def _operator(operator: Operator, chosen: FormOf, form: Format) -> Operator:
    return Operator(operator.name, tuple(_matrix(matrix, chosen, form) for matrix in operator.matrices))


def _matrix(matrix: Matrix, chosen: FormOf, form: Format) -> Matrix:
    wanted = chosen(matrix.path) is form and form.bytes_per_weight < matrix.form.bytes_per_weight
    return replace(matrix, form=form) if wanted else matrix
