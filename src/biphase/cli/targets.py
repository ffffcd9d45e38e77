"""What a command measures: a server that is there, or the built-in engine for the length of the command."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from biphase.cli.profile_options import refuse_model_as_url
from biphase.errors import BadInput

if TYPE_CHECKING:
    from biphase.client.endpoint import Access
    from biphase.report.progress import Display
    from biphase.server.launch import ServerProcess


def server_address(url: str, access: "Access", engine_options: Sequence[str] = ()) -> "tuple[str, Access]":
    """A URL in its plain form, or ``local``, and how to talk to what is there: a login in a URL goes with the access.

    ``BadInput`` for what is no URL, and for options of the built-in engine beside one.
    """
    from biphase.client.endpoint import parse_url

    if url != "local":
        url, access = access.at(parse_url(refuse_model_as_url(url)))
    if engine_options:
        raise BadInput(f"{engine_options[0]} is for the built-in engine and says nothing to the server at {url}")
    return url, access


def found_server(access: "Access", shown: "Display") -> str:
    """Address of the one server on this machine."""
    from biphase.client import clock
    from biphase.client.local import find_local, only_one

    shown.status("looking for a server on this machine's usual ports")
    server = only_one(clock.run(find_local(access)))
    shown.status(f"found {server.url}, {server.product}'s usual port, with {', '.join(server.models) or 'no model'}")
    return server.url


def start_engine(stack: ExitStack, model: str, engine_options: Sequence[str], shown: "Display") -> "ServerProcess":
    """The built-in engine on a free loopback port; it ends with ``stack``."""
    from biphase.server.launch import managed_server

    def on_wait(seconds: float) -> None:
        shown.status(f"starting the built-in engine on {model}")

    return stack.enter_context(managed_server(model, *engine_options, on_wait=on_wait))


@contextmanager
def one_interrupt() -> Iterator[Callable[[], int]]:
    """Ctrl-C or SIGTERM ends the run once, so that the engine is ended and what was measured is kept; more add nothing.

    Gives the exit status of an interrupted run by the usual rule, 128 + the signal.
    """
    from biphase.client import clock

    received: list[signal.Signals] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        if len(received) > 1:
            return  # the first one is being obeyed: what was measured is on its way to the table and the files
        # not through SIGINT: a shell lets the commands it runs in the background ignore that
        if not clock.interrupt():
            raise KeyboardInterrupt

    # A shell lets the commands that it runs in the background ignore SIGINT; so do we.
    numbers = [signal.SIGTERM, *([signal.SIGINT] if signal.getsignal(signal.SIGINT) != signal.SIG_IGN else [])]
    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield lambda: 128 + (received[0] if received else signal.SIGINT)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
