"""``biphase roofline``: what the hardware permits, for a model and a device."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from biphase.cli.outputs import check_writable, deliver
from biphase.cli.ranges import check_range

if TYPE_CHECKING:
    from biphase.roofline.hardware import Device
    from biphase.roofline.sheet import Sheet

MOST_COMBINATIONS = 500
MOST_GPUS = 1_000_000
MOST_BLOCKS = 1_000_000_000


def roofline(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            show_default=False,
            help="config.json, model folder, GGUF file, smollm2-135m, or a shipped name such as llama-3.1-8b.",
        ),
    ],
    gpu: Annotated[
        str, typer.Option(metavar="NAME,...", help="Devices in any spelling; local is this machine, calibrated.")
    ] = "h100",
    dtype: Annotated[
        str | None, typer.Option(help="Store linear layers as bf16, fp8, fp8_block, int8, int4, mxfp4 or nvfp4.")
    ] = None,
    kv_dtype: Annotated[str, typer.Option(help="Cache elements: bf16, fp8, ...")] = "bf16",
    tp: Annotated[int, typer.Option(min=1, help="GPUs that share each layer (tensor parallel).")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Copies of the attention that share the batch.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Groups of GPUs that share the experts.")] = 1,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens to prefill.")] = 2048,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that decode together.")] = 1,
    context: Annotated[
        int | None, typer.Option(min=1, show_default="as prompt", help="Tokens that each decode attends to.")
    ] = None,
    peak_tflops: Annotated[
        float | None, typer.Option(help="Dense peak of a device that is not in the table.", show_default=False)
    ] = None,
    bandwidth_tbps: Annotated[float | None, typer.Option(help="Its bandwidth, TB/s.", show_default=False)] = None,
    memory_gb: Annotated[float | None, typer.Option(help="Its memory, GB.", show_default=False)] = None,
    kv_blocks: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Cache blocks of 16 tokens that an engine logged at start."),
    ] = None,
    engine: Annotated[str, typer.Option(help="Whose measured constants: vllm, trtllm, sglang.")] = "vllm",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", show_default=False, help="Write the numbers there.")
    ] = None,
) -> None:
    """Compute FLOPs, bytes and seconds of both phases: does it fit, what limits it, the floor, and how to beat it."""
    from biphase.report.roofline_tables import print_sheets
    from biphase.roofline.catalogue import load
    from biphase.roofline.execution import Execution, Parallelism, check_cache
    from biphase.roofline.formats import kv_element_bytes, weight_format
    from biphase.roofline.sheet import Shape, make_sheet

    for option, count in (("--tp", tp), ("--dp", dp), ("--ep", ep)):
        check_range(option, count, 1, MOST_GPUS, "GPUs")
    check_range("--kv-blocks", kv_blocks, 1, MOST_BLOCKS)
    check_writable(json_file)
    devices = _devices(gpu, peak_tflops, bandwidth_tbps, memory_gb)
    form = weight_format(dtype) if dtype else None
    architectures = [load(name, form) for name in models]
    _refuse_many(len(devices) * len(architectures))
    for architecture in architectures:
        check_cache(architecture, kv_dtype)
    execution = Execution(Parallelism(tp, dp, ep), kv_element_bytes(kv_dtype), engine=_engine(engine))
    shape = Shape(prompt, batch, context or prompt)
    _refuse_large(shape.prompt_tokens, shape.context_tokens, batch)
    sheets = [make_sheet(a, d, execution, shape, kv_blocks) for a in architectures for d in devices]
    deliver(lambda: print_sheets(sheets), (json_file, lambda: _json(sheets)))


def _devices(gpu: str, *numbers: float | None) -> "list[Device]":
    from biphase.errors import BadInput
    from biphase.roofline.hardware import custom_device, find_device

    peak, bandwidth, memory = numbers
    if peak is not None and bandwidth is not None and memory is not None:
        return [custom_device(peak, bandwidth, memory)]
    if any(number is not None for number in numbers):
        raise BadInput("a device of your own needs all three of --peak-tflops, --bandwidth-tbps and --memory-gb")
    names = [name.strip() for name in gpu.split(",") if name.strip()]
    if not names:
        raise BadInput("--gpu is empty; give a device such as h100, or several with commas")
    return [find_device(name) for name in names]


def _engine(name: str) -> str:
    from biphase.errors import BadInput

    known = ("vllm", "trtllm", "sglang")
    if name.lower() not in known:
        raise BadInput(f"unknown engine {name!r}; measured constants are known for {', '.join(known)}")
    return name.lower()


def _refuse_many(combinations: int) -> None:
    from biphase.errors import BadInput

    if combinations > MOST_COMBINATIONS:
        raise BadInput(f"{combinations} combinations of model and device; at most {MOST_COMBINATIONS} in one table")


def _refuse_large(prompt: int, context: int, batch: int) -> None:
    from biphase.errors import BadInput
    from biphase.roofline.phases import LONGEST

    if max(prompt, context) > LONGEST:
        raise BadInput(f"prompt and context must be at most {LONGEST:,} tokens, found {max(prompt, context):,}")
    if batch > 2**17:
        raise BadInput(f"--batch must be at most {2**17:,} sequences, found {batch:,}")


def _json(sheets: "list[Sheet]") -> bytes:
    from biphase import __version__
    from biphase.report.pretty_json import pretty_json

    return pretty_json({"biphase": __version__, "sheets": sheets})
