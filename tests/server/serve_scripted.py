"""The real server in front of the scripted engine: ``python serve_scripted.py FOLDER SCRIPT PORT``."""

import json
import sys
from pathlib import Path

from biphase.engine.options import EngineOptions
from biphase.errors import BiphaseError
from biphase.server.serving import ServeSettings, Started, bind, run


def announce(started: Started) -> None:
    print(json.dumps({"url": started.url, "model": started.model.name}), flush=True)


def main() -> int:
    folder, script, port = sys.argv[1:]
    command = (sys.executable, str(Path(__file__).with_name("scripted_engine.py")), script)
    try:
        sock = bind("127.0.0.1", int(port))
        settings = ServeSettings("tiny", Path(folder), sock, EngineOptions(model=folder), True, command)
        return run(settings, announce)
    except BiphaseError as error:
        print(f"biphase: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
