"""Starting the built-in server as a child and ending it again: against stand-ins for the child that misbehave."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from biphase.errors import BadInput, RunFailed
from biphase.server import launch
from biphase.server.launch import managed_server

GOOD = """
    print('{"url": "http://127.0.0.1:1", "model": "m"}', flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Child":
    return Child(tmp_path / "child", monkeypatch)


class Child:
    """Puts a script in the place of the interpreter that would run ``-m biphase serve``."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.monkeypatch = path, monkeypatch

    def does(self, body: str) -> None:
        script = f"#!{sys.executable}\nimport signal, sys, time\n{textwrap.dedent(body)}"
        self.path.write_text(script)
        self.path.chmod(0o755)
        self.monkeypatch.setattr(sys, "executable", str(self.path))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_ready_child_gives_its_address_and_ends_with_the_block(child: Child) -> None:
    child.does(GOOD)
    with managed_server("m") as server:
        assert (server.url, server.model) == ("http://127.0.0.1:1", "m")
        assert alive(server.pid)
        assert server.death() is None
    assert not alive(server.pid)


def test_the_child_is_told_model_and_options(child: Child, tmp_path: Path) -> None:
    child.does(f"open({str(tmp_path / 'argv')!r}, 'w').write(' '.join(sys.argv[1:]))\n" + textwrap.dedent(GOOD))
    with managed_server("some-model", "--dtype", "float32"):
        pass
    said = (tmp_path / "argv").read_text()
    assert said == "-m biphase serve some-model --host 127.0.0.1 --port 0 --managed --dtype float32"


@pytest.mark.parametrize(("status", "kind"), [(1, RunFailed), (2, BadInput)])
def test_a_child_that_does_not_start_says_why(child: Child, status: int, kind: type[Exception]) -> None:
    child.does(f"""
        print("loading", file=sys.stderr)
        print("biphase: no such model: x", file=sys.stderr)
        sys.exit({status})
    """)
    with pytest.raises(kind, match=r"^no such model: x$"), managed_server("x"):
        pass


def test_a_child_that_says_something_else_is_one_line(child: Child) -> None:
    child.does("print('hello', flush=True)\nsys.stdin.read()")
    with pytest.raises(RunFailed, match="said something unexpected when it started: b'hello"), managed_server("x"):
        pass


def test_a_child_that_is_never_ready_is_given_up(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "START_LIMIT_S", 0.6)
    monkeypatch.setattr(launch, "LOOK_EVERY_S", 0.1)
    child.does("sys.stdin.read()")
    waits: list[float] = []
    with pytest.raises(RunFailed, match="was not ready after 1 s"), managed_server("x", on_wait=waits.append):
        pass
    assert len(waits) >= 4


def test_a_child_that_does_not_listen_is_killed(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "CLOSE_LIMIT_S", 0.2)
    monkeypatch.setattr(launch, "TERMINATE_LIMIT_S", 0.2)
    child.does("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print('{"url": "http://127.0.0.1:1", "model": "m"}', flush=True)
        time.sleep(60)
    """)
    with managed_server("m") as server:
        pass
    assert not alive(server.pid)


def test_a_failure_in_the_block_becomes_the_death_of_the_child(child: Child) -> None:
    child.does("""
        print('{"url": "http://127.0.0.1:1", "model": "m"}', flush=True)
        print("biphase: out of memory", file=sys.stderr)
        sys.exit(1)
    """)

    def use() -> None:
        with managed_server("m") as server:
            while server.death() is None:
                time.sleep(0.01)
            raise RunFailed("the connection broke")

    with pytest.raises(RunFailed, match=r"^the built-in engine ended \(status 1\): out of memory$"):
        use()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_child_ends_also_when_the_block_fails(child: Child, error: type[BaseException]) -> None:
    child.does(GOOD)
    seen = []

    def use() -> None:
        with managed_server("m") as server:
            seen.append(server.pid)
            raise error

    with pytest.raises(error):
        use()
    assert not alive(seen[0])


def test_much_log_does_not_block_the_child(child: Child) -> None:
    child.does("for _ in range(20000): print('a line of log', file=sys.stderr)\n" + textwrap.dedent(GOOD))
    with managed_server("m") as server:
        assert server.death() is None


def test_the_launcher_loads_neither_torch_nor_the_server() -> None:
    script = (
        "import sys, biphase.server.launch\nprint([m for m in ('torch', 'starlette', 'numpy') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    assert shown.stdout.strip() == "[]"
