"""``python -m biphase`` is the ``biphase`` command; Ctrl-C ends it quietly from the first import on."""

import signal
import sys

signal.signal(signal.SIGINT, signal.SIG_DFL)  # until ``main`` can answer it: no traceback out of an import


def main() -> None:
    """Entry point of the console script."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from biphase.cli.main import run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
