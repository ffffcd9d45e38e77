"""Which matrix of a checkpoint is stored how: ``quantization_config`` of a Hugging Face config, read as rules.

Checkpoints leave modules out (the head, the router, whole attention blocks); the rules say which, by module path.
"""

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from biphase.errors import BadInput
from biphase.roofline import formats
from biphase.roofline.fields import Fields
from biphase.roofline.formats import Format

FormOf = Callable[[str], Format]

# Never quantised by any of these methods: lookups, routers, gates and convolutions are no large linear layers.
_ALWAYS_PLAIN = (
    "*embed_tokens", "*.mlp.gate", "*.mixer.gate", "*.mlp.router", "*.router", "*.router.proj",
    "*.block_sparse_moe.gate", "*.feed_forward.router", "*.shared_expert_gate",
)  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """Modules that match one of ``targets`` are stored in ``form``; ``Linear`` means every linear module."""

    targets: tuple[str, ...]
    form: Format


@dataclass(frozen=True)
class Storage:
    """The format of each module: ``plain`` where it is skipped or no rule matches, else that of the first rule."""

    plain: Format
    rules: tuple[Rule, ...] = ()
    skipped: tuple[str, ...] = ()

    def form(self, path: str) -> Format:
        """The format of the module at ``path`` (model.layers.0.self_attn.q_proj)."""
        if any(matches(path, pattern) for pattern in (*_ALWAYS_PLAIN, *self.skipped)):
            return self.plain
        for rule in self.rules:
            if any(target == "Linear" or matches(path, target) for target in rule.targets):
                return rule.form
        return self.plain


def matches(path: str, pattern: str) -> bool:
    """Whether a module lies at or below ``pattern``: a path with ``*``, a last name, or ``re:`` and an expression."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], path) is not None
        except re.error as error:
            raise BadInput(f"quantization_config: {pattern!r} is no regular expression ({error})") from error
    pattern = pattern.replace("language_model.", "")
    if "." not in pattern and "*" not in pattern:
        return pattern in path.split(".")
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, pattern + ".*")


def uniform(form: Format, plain: Format = formats.BF16) -> Storage:
    """Every linear layer in ``form``; head, embedding and routers stay ``plain``, as engines quantise on load."""
    if form.bits >= 16:
        return Storage(plain=form)
    return Storage(plain=plain, rules=(Rule(("Linear",), form),), skipped=("lm_head",))


def read_storage(config: Fields) -> Storage:
    """The rules of a config: none without ``quantization_config``. BadInput names a method that is not understood."""
    plain = _plain_format(config)
    if "quantization_config" not in config:
        return Storage(plain=plain)
    quantization = config.nested("quantization_config")
    method = quantization.text("quant_method", "modelopt" if "quant_algo" in quantization else "")
    reader = _METHODS.get(method)
    if reader is None:
        known = ", ".join(sorted(_METHODS))
        raise BadInput(f"{quantization.source}: quant_method {method!r} is not supported; known: {known}")
    return replace(reader(quantization), plain=plain)


def _plain_format(config: Fields) -> Format:
    name = config.raw("torch_dtype") or config.raw("dtype") or "bfloat16"
    known = {"bfloat16": formats.BF16, "float16": formats.FP16, "float32": formats.FP32}
    key = str(name).removeprefix("torch.")
    if key not in known:
        raise BadInput(f"{config.source}: torch_dtype {name!r} is not supported; known: {', '.join(known)}")
    return known[key]


def _modules(quantization: Fields) -> tuple[str, ...]:
    names = ("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers")
    found = [pattern for name in names for pattern in quantization.list_of(name) or []]
    for pattern in found:
        if not isinstance(pattern, str):
            raise BadInput(f"{quantization.source}: modules left out must be strings, found {pattern!r}")
    return tuple(found)


def _fp8(quantization: Fields) -> Storage:
    form = _blocks(quantization, "weight_block_size")
    return _linear(form or formats.FP8, quantization)


def _blocks(fields: Fields, name: str) -> Format | None:
    """fp8 with one scale a block of [outputs, inputs]; None without the field."""
    block = fields.list_of(name)
    if block is None:
        return None
    if len(block) != 2 or not all(type(side) is int and 0 < side <= 2**20 for side in block):
        raise BadInput(f"{fields.source}: {name} must be two positive numbers, found {str(block)[:60]}")
    return replace(formats.FP8_BLOCK, group_rows=block[0], group=block[1])


def _fbgemm_fp8(quantization: Fields) -> Storage:
    return _linear(formats.FP8_ROW, quantization)


def _awq(quantization: Fields) -> Storage:
    bits = quantization.first_count("bits", "w_bit", default=4)
    group = quantization.first_count("group_size", "q_group_size", default=128, least=-1)
    zero = quantization.flag("zero_point", True)
    return _linear(formats.grouped_integer(f"awq_int{bits}", bits, group, zero_points=zero), quantization)


def _gptq(quantization: Fields) -> Storage:
    bits = quantization.count("bits", 4)
    group = quantization.count("group_size", 128, least=-1)
    # the file keeps qzeros for symmetric checkpoints as well
    form = formats.grouped_integer(f"gptq_int{bits}", bits, group, zero_points=True, order=True)
    if quantization.flag("lm_head"):
        return Storage(formats.BF16, (Rule(("Linear",), form),), _modules(quantization))
    return _linear(form, quantization)


def _mxfp4(quantization: Fields) -> Storage:
    return Storage(formats.BF16, (Rule(("*.mlp.experts",), formats.MXFP4),), ("lm_head", *_modules(quantization)))


def _modelopt(quantization: Fields) -> Storage:
    algorithm = quantization.text("quant_algo", "")
    known = {"FP8": formats.FP8, "NVFP4": formats.NVFP4, "FP8_BLOCK_SCALES": formats.FP8_BLOCK}
    if algorithm not in known:
        raise BadInput(f"{quantization.source}: quant_algo {algorithm!r} is not supported; known: {', '.join(known)}")
    return _linear(known[algorithm], quantization)


def _compressed_tensors(quantization: Fields) -> Storage:
    groups = quantization.nested("config_groups")
    rules = []
    for name in quantization.raw("config_groups"):
        group = groups.nested(name)
        targets = tuple(str(target) for target in group.list_of("targets") or ["Linear"])
        rules.append(Rule(targets, _scheme(group.nested("weights"))))
    return Storage(formats.BF16, tuple(rules), _modules(quantization))


def _scheme(weights: Fields) -> Format:
    bits, kind = weights.count("num_bits"), weights.text("type")
    strategy, group = weights.text("strategy"), weights.count("group_size", 0, least=-1)
    if kind == "float" and bits == 8:
        return _float8_scheme(weights, strategy)
    if kind == "float" and bits == 4:
        return formats.NVFP4 if group == 16 else formats.MXFP4
    if kind == "int" and bits == 8 and strategy == "channel":
        return formats.INT8
    if kind == "int" and bits in (4, 8):
        asymmetric = not weights.flag("symmetric", True)
        return formats.grouped_integer(f"int{bits}", bits, group, zero_points=asymmetric)
    raise BadInput(f"{weights.source}: {bits}-bit {kind} weights ({strategy}) are not supported")


def _float8_scheme(weights: Fields, strategy: str) -> Format:
    if strategy == "tensor":
        return formats.FP8
    if strategy == "channel":
        return formats.FP8_ROW
    if strategy == "block":
        return _blocks(weights, "block_structure") or formats.FP8_BLOCK
    raise BadInput(f"{weights.source}: fp8 strategy {strategy!r} is not supported; known: tensor, channel, block")


def _linear(form: Format, quantization: Fields) -> Storage:
    return Storage(formats.BF16, (Rule(("Linear",), form),), ("lm_head", *_modules(quantization)))


_METHODS: dict[str, Callable[[Fields], Storage]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
}
