"""``python -m biphase`` is the ``biphase`` command; Ctrl-C ends it quietly from the first import on."""

import sys


def main() -> None:
    """Entry point of the console script."""
    try:
        from biphase.cli.main import run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
