"""The ``biphase`` command: one file a command, loaded only when it runs, so that ``--help`` answers at once."""

import sys

import typer

from biphase import __version__
from biphase.cli import calibrate, compare, profile, roofline, serve
from biphase.errors import BiphaseError

app = typer.Typer(
    name="biphase",
    help="Prefill and decode, the two phases of LLM inference: measure them, model them, serve them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # its boxes cut long option names short
    pretty_exceptions_enable=False,
)
app.command("profile")(profile.profile)
app.command("serve")(serve.serve)
app.command("roofline")(roofline.roofline)
app.command("calibrate")(calibrate.calibrate)
app.command("compare")(compare.compare)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"biphase {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Show the version."),
) -> None:
    """Options of every command come after its name: biphase profile --help."""


def run() -> None:
    """Entry point: errors of biphase become one line on stderr and an exit status, Ctrl-C becomes 130."""
    try:
        app()
    except BiphaseError as error:
        print(f"biphase: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
