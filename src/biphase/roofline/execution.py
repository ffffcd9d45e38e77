"""How a model is run: split over which GPUs, with which cache dtype, priced at which efficiency."""

from dataclasses import dataclass, field

from biphase.errors import BadInput
from biphase.roofline.architecture import Architecture, Attention, LatentAttention
from biphase.roofline.formats import FP8_DS_MLA


@dataclass(frozen=True)
class Parallelism:
    """``tp`` GPUs share each layer, ``dp`` copies of the attention share the batch, ``ep`` groups share the experts.

    tp·dp GPUs in all; the experts are spread over all of them, ``ep`` ways by expert and tp·dp/ep ways by column.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name, value in (("tp", self.tp), ("dp", self.dp), ("ep", self.ep)):
            if value < 1:
                raise BadInput(f"{name} must be at least 1, found {value}")
        if self.gpus % self.ep:
            raise BadInput(f"ep {self.ep} does not divide the {self.gpus} GPUs")

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.tp * self.dp


@dataclass(frozen=True)
class Execution:
    """``kv_bytes`` of one cache element; ``measured``: the device's constants instead of the datasheet's peaks.

    ``engine`` chooses among constants measured with several engines.
    """

    parallel: Parallelism = field(default_factory=Parallelism)
    kv_bytes: float = 2.0
    measured: bool = False
    engine: str = ""


def check_cache(architecture: Architecture, kv_dtype: str) -> None:
    """BadInput when a cache layout made for one kind of attention is asked for on another."""
    if kv_dtype != FP8_DS_MLA:
        return
    for mixer, _ in architecture.attentions:
        if not (isinstance(mixer, LatentAttention) and (mixer.latent_dim, mixer.rope_dim) == (512, 64)):
            raise BadInput(
                f"the KV dtype {kv_dtype} is DeepSeek's latent of 512 + 64; {architecture.name} has none; use fp8"
            )


def check_split(architecture: Architecture, parallel: Parallelism) -> None:
    """BadInput when the model cannot be split so: heads that do not divide, more expert groups than experts."""
    for mixer, _ in architecture.attentions:
        if mixer.heads % parallel.tp:
            raise BadInput(f"tp {parallel.tp} does not divide the {mixer.heads} attention heads of {architecture.name}")
        if isinstance(mixer, Attention) and parallel.tp <= mixer.kv_heads and mixer.kv_heads % parallel.tp:
            raise BadInput(f"tp {parallel.tp} does not divide the {mixer.kv_heads} KV heads of {architecture.name}")
    counts = [layer.experts.count for layer in architecture.layers if layer.experts]
    if parallel.ep > 1 and not counts:
        raise BadInput(f"{architecture.name} has no experts to share; leave --ep at 1")
    if counts and min(counts) < parallel.ep:
        raise BadInput(f"ep {parallel.ep} is more than the {min(counts)} experts of {architecture.name}")
