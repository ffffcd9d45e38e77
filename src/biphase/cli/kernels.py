"""``biphase kernels``: what each compiled kernel reaches here, beside the roofs of this machine."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from biphase.cli.outputs import check_writable, deliver
from biphase.cli.ranges import ACTIVATIONS, KV_CACHE_DTYPES, check_choice, check_range
from biphase.cli.targets import one_interrupt
from biphase.errors import BadInput
from biphase.models import DEFAULT_MODEL

if TYPE_CHECKING:
    from biphase.roofline.kernel_rates import KernelReport

ROWS = "1,2,4,8,16,32,64,128,256,512"
MOST_ROWS = 4096
MOST_REPEATS = 1000
DTYPES = ("auto", "int8")


def kernels(
    model: Annotated[
        str,
        typer.Argument(help="Alias, GGUF file, folder with config.json and safetensors, or Hugging Face repository."),
    ] = DEFAULT_MODEL,
    rows: Annotated[str, typer.Option(help="Rows of a step: sequences that decode, or tokens of a prompt.")] = ROWS,
    repeats: Annotated[int, typer.Option(help="Visits to each kernel, after one that does not count.")] = 5,
    dtype: Annotated[str, typer.Option(help="Of the weights: auto (as the file has them) or int8.")] = "auto",
    activations: Annotated[
        str, typer.Option(help="exact (16 bits in two bytes), or int8: faster and lossy.")
    ] = "exact",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto (float16), or int8: about half, lossy.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, show_default="one a core", help="Threads of the kernels.")
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Time the shape in a config.json without its weights.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", show_default=False, help="Write all numbers there.")
    ] = None,
) -> None:
    """Time the engine's kernels by row count: GB/s, GOP/s, share of the roof measured here, and which one is chosen."""
    wanted = _rows(rows)
    check_range("--repeats", repeats, 1, MOST_REPEATS)
    check_choice("--dtype", dtype, DTYPES, "; others run in torch, with its kernels")
    check_choice("--activations", activations, ACTIVATIONS)
    check_choice("--kv-cache-dtype", kv_cache_dtype, KV_CACHE_DTYPES)
    check_writable(json_file)
    missing = [name for name in ("gguf", "numba", "torch") if importlib.util.find_spec(name) is None]
    if missing:
        raise BadInput(f"biphase kernels needs {', '.join(missing)}; run: pip install 'biphase[engine]'")
    from biphase.engine.kernels import can_compile

    if not can_compile():
        raise BadInput("biphase kernels times compiled kernels, and NUMBA_DISABLE_JIT is set: unset it")
    from biphase.engine.build import unless_damaged
    from biphase.engine.kernel_timing import time_kernels
    from biphase.engine.options import EngineOptions
    from biphase.report.kernel_tables import print_kernels
    from biphase.report.progress import display

    options = EngineOptions(
        model=model,
        dtype=cast(Literal["auto", "int8"], dtype),
        activations=cast(Literal["exact", "int8"], activations),
        kv_cache_dtype=cast(Literal["auto", "int8"], kv_cache_dtype),
        threads=threads,
        random_weights=random_weights,
    )
    with one_interrupt() as exit_status:
        try:
            with display() as shown:
                found = unless_damaged(lambda: time_kernels(options, wanted, repeats, shown), shown.status)
            deliver(lambda: print_kernels(found), (json_file, lambda: _json(found)))
        except KeyboardInterrupt:
            raise typer.Exit(exit_status()) from None
        if found.interrupted:
            raise typer.Exit(exit_status())


def _rows(text: str) -> tuple[int, ...]:
    try:
        wanted = sorted({int(part) for part in text.split(",")})
    except ValueError:
        wanted = []
    if not wanted or wanted[0] < 1 or wanted[-1] > MOST_ROWS:
        raise BadInput(f"--rows {text!r}: expected whole numbers from 1 to {MOST_ROWS:,}, as in 1,8,64,512")
    return tuple(wanted)


def _json(found: "KernelReport") -> bytes:
    from biphase import __version__
    from biphase.report.pretty_json import pretty_json

    return pretty_json({"biphase": __version__, "kernels": found})
