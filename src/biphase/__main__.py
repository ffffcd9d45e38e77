"""``python -m biphase`` is the ``biphase`` command."""

from biphase.cli.main import run

if __name__ == "__main__":
    run()
