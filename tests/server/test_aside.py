"""What may take long is done beside the loop that serves the streams."""

import asyncio
import json
import threading

import pytest

from biphase.server.app import LONG_BODY_BYTES, _aside

PLAIN = b'{"prompt": "a"}'
SCHEMA = b'{"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}'
DISGUISED = SCHEMA.replace(b"json_schema", b"json\\u005fschema")


@pytest.mark.parametrize(
    ("raw", "beside"), [(PLAIN, False), (SCHEMA, True), (DISGUISED, True), (PLAIN + b" " * LONG_BODY_BYTES, True)]
)
def test_a_schema_or_a_long_body_is_read_in_a_thread(raw: bytes, beside: bool) -> None:
    assert json.loads(raw)["prompt"] == "a"
    ran_in = asyncio.run(_aside(threading.get_ident, raw))
    assert (ran_in != threading.get_ident()) == beside


def test_the_disguise_is_one() -> None:
    assert json.loads(DISGUISED) == json.loads(SCHEMA)
    assert b"json_schema" not in DISGUISED
