"""The ``biphase`` command: one file a command, loaded only when it runs, so that ``--help`` answers at once."""

import sys
from typing import NoReturn

import typer
from typer.exceptions import TyperException

from biphase import __version__
from biphase.cli import bench, calibrate, compare, kernels, profile, roofline, serve, split, stall
from biphase.cli.outputs import flush_stdout, show_any_character, stdout_takes_nothing
from biphase.errors import BadInput, BiphaseError
from biphase.report.terminal import say

app = typer.Typer(
    name="biphase",
    help="Prefill and decode, the two phases of LLM inference: measure them, model them, serve them.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,  # its boxes cut long option names short
    pretty_exceptions_enable=False,
)
app.command("profile")(profile.profile)
app.command("serve")(serve.serve)
app.command("roofline")(roofline.roofline)
app.command("calibrate")(calibrate.calibrate)
app.command("kernels")(kernels.kernels)
app.command("compare")(compare.compare)
app.command("bench")(bench.bench)
app.command("stall")(stall.stall)
app.command("split")(split.split)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"biphase {__version__}")
        raise typer.Exit


@app.callback()
def main(
    ctx: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Show the version."),
) -> None:
    """Prefill and decode, the two phases of LLM inference: measure them, model them, serve them."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def run() -> None:
    """Entry point: what a user did wrong becomes one line on stderr and an exit status, Ctrl-C becomes 130.

    So does a stdout that takes no more; one that nobody reads, as of ``| head``, ends without a word.
    """
    show_any_character()
    try:
        status = app(standalone_mode=False)
        flush_stdout()
    except BiphaseError as error:
        _fail(str(error), error.exit_code)
    except TyperException as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context else "biphase"
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        _fail(f"{text} (see: {where} --help)", BadInput.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except OSError as error:
        if not stdout_takes_nothing():
            raise
        if isinstance(error, BrokenPipeError):
            sys.exit(BiphaseError.exit_code)
        _fail(f"cannot write to standard output: {error.strerror}", BiphaseError.exit_code)
    else:
        sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str, status: int) -> NoReturn:
    say(f"biphase: {message}")
    sys.exit(status)
