"""An engine's process without a model: answers each request with its own prompt, token by token, on a script.

``python scripted_engine.py SCRIPT FD OPTIONS``. After the prompt's last token it emits the end of sequence where the
request has one, and starts over where it has none. Each token has log-probability -0.5, the next id -1.5, and so on.
It writes every frame that it receives to the script's log.
"""

import contextlib
import os
import select
import socket
import sys
import time
from typing import Literal

import msgspec

from biphase.engine import messages
from biphase.engine.messages import Fatal, Output, Ready, Step, Submit, SubmitAll, ToEngine, Vocabulary
from biphase.scheduling.request import TokenLogprobs


class Script(msgspec.Struct, forbid_unknown_fields=True):
    """``gap`` seconds pass before each step. ``die_at``, ``fail_at`` and ``hang_at`` count the tokens of a request.

    ``refuse`` is the error code of an engine that takes no request; ``cached`` are the tokens of each prompt that its
    prefix cache gave.
    """

    log: str
    gap: float = 0.0
    fatal: str | None = None
    exit_at_start: int | None = None
    die_at: int | None = None
    fail_at: int | None = None
    hang_at: int | None = None
    refuse: Literal["queue_full", "rejected"] | None = None
    retry_after: float | None = None
    cached: int = 0
    max_model_len: int = 64
    vocab_size: int = 300


class Running:
    """A request and how many tokens it has got."""

    def __init__(self, submit: Submit) -> None:
        self.submit, self.count = submit, 0

    def step(self, script: Script) -> Output:
        submit, self.count = self.submit, self.count + 1
        if self.count == script.die_at:
            os._exit(7)
        if self.count == script.fail_at:
            return Output(submit.id, (), "error", "the logits of this request are not finite")
        position = self.count - 1
        if submit.stop_ids and position == len(submit.prompt):
            return self._output(min(submit.stop_ids), "stop", script)
        token = submit.prompt[position % len(submit.prompt)]
        reason = "stop" if token in submit.stop_ids else "length" if self.count == submit.max_tokens else None
        return self._output(token, reason, script)

    def _output(self, token: int, reason: str | None, script: Script) -> Output:
        wanted, first = self.submit.sampling.logprobs, self.count == 1
        top = tuple((token + n, -0.5 - n) for n in range(wanted or 0))
        return Output(
            self.submit.id,
            (token,),
            reason,
            logprobs=() if wanted is None else (TokenLogprobs(-0.5, top),),
            cached_tokens=script.cached if first else None,
            queue_seconds=0.125 if first else None,
        )


class Engine:
    """Every open request gets a token in every step."""

    def __init__(self, script: Script, sock: socket.socket) -> None:
        self.script, self.sock, self.buffer = script, sock, b""
        self.running: dict[str, Running] = {}
        self.log = os.open(script.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def serve(self) -> None:
        while self._receive():
            time.sleep(self.script.gap)
            due = [one for one in self.running.values() if one.count + 1 != self.script.hang_at]
            outputs = tuple(one.step(self.script) for one in due)
            for output in outputs:
                if output.finish_reason is not None:
                    del self.running[output.id]
            if outputs:
                self.send(Step(outputs, self.script.gap, 0, len(outputs), len(self.running), 0, 0.25))

    def _receive(self) -> bool:
        """Take what has arrived, waiting while nothing is to be done; false when the server has gone."""
        stuck = all(one.count + 1 == self.script.hang_at for one in self.running.values())
        if stuck or select.select([self.sock], [], [], 0)[0]:
            data = self.sock.recv(1 << 20)
            self.buffer += data
            self._take_frames()
            return bool(data)
        return True

    def _take_frames(self) -> None:
        header = messages.HEADER
        while len(self.buffer) >= header.size:
            (size,) = header.unpack_from(self.buffer)
            if len(self.buffer) < header.size + size:
                return
            self._take(messages.decode_to_engine(self.buffer[header.size : header.size + size]))
            self.buffer = self.buffer[header.size + size :]

    def _take(self, message: ToEngine) -> None:
        if isinstance(message, Vocabulary):
            return
        together = message.submits if isinstance(message, SubmitAll) else (message,)
        for one in together:
            os.write(self.log, msgspec.json.encode(one) + b"\n")
        if isinstance(message, Submit | SubmitAll) and self.script.refuse is not None:
            self.send(Step(tuple(self._refusal(one.id) for one in together), 0.0, 0, 0, 0, 0, 0.0))
        for one in together:
            if isinstance(one, Submit) and self.script.refuse is None:
                self.running[one.id] = Running(one)
            else:
                self.running.pop(one.id, None)

    def _refusal(self, request_id: str) -> Output:
        script = self.script
        reason = "7 requests wait, as many as may"
        return Output(request_id, (), "error", reason, error_code=script.refuse, retry_after=script.retry_after)

    def send(self, message: Ready | Fatal | Step) -> None:
        self.sock.sendall(messages.pack(message))


def main() -> None:
    script = msgspec.json.decode(sys.argv[1], type=Script)
    engine = Engine(script, socket.socket(fileno=int(sys.argv[2])))
    if script.exit_at_start is not None:
        sys.exit(script.exit_at_start)
    with contextlib.suppress(ConnectionError):  # the server has gone
        if script.fatal is not None:
            engine.send(Fatal(script.fatal, 2))
            return
        engine.send(Ready(script.max_model_len, script.vocab_size, "float32", "float32", 16, 4, 0.0))
        engine.serve()


if __name__ == "__main__":
    main()
