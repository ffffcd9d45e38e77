"""A model's folder whose tokens are the 256 bytes, and the server in front of the scripted engine."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import Server, start_server, stop
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from biphase.engine.text import Text, load_text

BYTE = {chr(byte): byte for byte in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]}
EOS = 257
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Token id b is the byte b; 256 and 257 are the control tokens <bos> and <eos>."""
    others = [byte for byte in range(256) if byte not in BYTE.values()]
    alphabet = BYTE | {chr(0x100 + place): byte for place, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={**alphabet, "<bos>": 256, "<eos>": EOS}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    return tokenizer


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config.json, tokenizer.json and a chat template."""
    folder = tmp_path_factory.mktemp("byte_model")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 300, "eos_token_id": [EOS]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def byte_text(byte_model: Path) -> Text:
    return load_text(byte_model)


Launch = Callable[..., Server]


@pytest.fixture
def launch(byte_model: Path, tmp_path: Path) -> Iterator[Launch]:
    """Start a server with a script; it is ended with the test."""
    servers: list[Server] = []

    def start(port: int = 0, folder: Path = byte_model, **script: Any) -> Server:
        servers.append(start_server(folder, tmp_path / f"frames-{len(servers)}.jsonl", port, script))
        return servers[-1]

    yield start
    for server in servers:
        stop(server)


@pytest.fixture(scope="module")
def server(byte_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the tests of a module that leave it as it is; its engine takes 2 ms a token."""
    running = start_server(byte_model, tmp_path_factory.mktemp("engine") / "frames.jsonl", 0, {"gap": 0.002})
    yield running.wait_until_ready()
    stop(running)
