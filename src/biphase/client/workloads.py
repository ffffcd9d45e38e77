"""What requests look like: how long their prompts and answers are, what the prompts share, when they arrive.

The six classic shapes have one length each; the traces have every request of real traffic. A workload says nothing of
the words: prompts are made of the server's own tokens (``biphase.client.prompts``).
"""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import msgspec

from biphase.client.workload_file import MOONCAKE_BLOCK, Item, azure_items, mooncake_items, read_file
from biphase.errors import BadInput

SHAPES = {
    "chat": (512, 512, "a question and an answer of the same length"),
    "conversation": (1155, 211, "the means of Azure's conversation trace, 2023"),
    "code": (2048, 28, "the means of Azure's code trace, 2023"),
    "summarise": (2588, 291, "the means of arXiv summarisation, tokens of Llama 2"),
    "rag": (8000, 500, "retrieved passages before a question"),
    "reasoning": (500, 8000, "a short question and a long chain of thought"),
}
"""Input and output tokens of each request."""

TRACES = ("azure-conv", "azure-code", "mooncake")


@dataclass(frozen=True)
class Workload:
    """Requests in their order; ``source`` is one phrase on where they are from. ``block_tokens``: length of the blocks
    that prompts name as shared."""

    name: str
    source: str
    items: tuple[Item, ...]
    block_tokens: int = MOONCAKE_BLOCK

    @property
    def timed(self) -> bool:
        """Whether each request has the moment at which it arrived."""
        return self.items[0].at_s is not None

    @property
    def shares(self) -> bool:
        """Whether prompts share blocks, so that a prefix cache has something to answer."""
        return any(item.blocks for item in self.items)


def find_workload(text: str) -> Workload:
    """The workload of that name, or in that file; ``BadInput`` lists the names."""
    if text in SHAPES:
        inputs, outputs, source = SHAPES[text]
        return Workload(text, f"every request {inputs} tokens in and {outputs} out: {source}", (Item(inputs, outputs),))
    if text in TRACES:
        return _shipped(text)
    path = Path(text)
    if not path.exists():
        names = ", ".join([*SHAPES, *TRACES])
        raise BadInput(f"--workload {text!r} is neither a file nor one of {names}")
    items, block_tokens = read_file(path)
    return Workload(path.name, f"{len(items):,} requests of the file {path}", tuple(items), block_tokens)


def _shipped(name: str) -> Workload:
    folder = files("biphase.client").joinpath("traces")
    if name == "mooncake":
        packed = folder.joinpath("mooncake_synthetic_1000.jsonl.gz").read_bytes()
        source = "the first 1,000 requests of Mooncake's synthetic trace (Apache-2.0), prefixes shared as in the trace"
        return Workload(name, source, tuple(mooncake_items(packed, name)))
    kind = name.removeprefix("azure-")
    items = tuple(azure_items(folder.joinpath(f"azure_2023_{kind}.csv.gz").read_bytes(), name))
    source = f"Azure LLM inference trace 2023, {kind} ({len(items):,} requests of an hour; CC-BY-4.0, Microsoft)"
    return Workload(name, source, items)


class Described(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A workload in figures, for a result."""

    name: str
    source: str
    requests: int
    mean_input_tokens: float
    mean_output_tokens: float
    shares_prefixes: bool


def describe(workload: Workload) -> Described:
    """Its means and its source; ``requests``: how many there are before they repeat."""
    n = len(workload.items)
    return Described(
        name=workload.name,
        source=workload.source,
        requests=n,
        mean_input_tokens=sum(item.input_tokens for item in workload.items) / n,
        mean_output_tokens=sum(item.output_tokens for item in workload.items) / n,
        shares_prefixes=workload.shares,
    )
