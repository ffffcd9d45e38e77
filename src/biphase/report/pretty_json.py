"""JSON as the files of all commands are laid out."""

import msgspec


def pretty_json(content: object) -> bytes:
    """``content``, of types that msgspec writes, indented by two and ended by a newline."""
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"
