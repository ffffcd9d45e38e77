"""The real server in front of the scripted engine: ``python serve_scripted.py FOLDER SCRIPT PORT``.

The script's fields for keys, origins, health and draining are the server's own.
"""

import json
import sys
from pathlib import Path

from biphase.engine.options import EngineOptions
from biphase.errors import BiphaseError
from biphase.server.policy import Policy
from biphase.server.serving import ServeSettings, Started, run
from biphase.server.starting import bind, engine_process


def announce(started: Started) -> None:
    print(json.dumps({"url": started.url, "model": started.model.name}), flush=True)


def main() -> int:
    folder, script, port = sys.argv[1:]
    fields = json.loads(script)
    policy = Policy(
        tuple(fields.pop("api_keys", ())), tuple(fields.pop("cors_origins", ())), fields.pop("health_timeout", 120.0)
    )
    drain_timeout = fields.pop("drain_timeout", 30.0)
    command = (sys.executable, str(Path(__file__).with_name("scripted_engine.py")), json.dumps(fields))
    try:
        sock = bind("127.0.0.1", int(port))
        options = EngineOptions(model=folder)
        with engine_process(options, command) as engine:
            settings = ServeSettings("tiny", Path(folder), sock, engine, 64, True, policy, drain_timeout)
            return run(settings, announce)
    except BiphaseError as error:
        print(f"biphase: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
