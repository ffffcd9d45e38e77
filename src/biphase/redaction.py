"""What no message, report or record may show of what a user typed: logins in URLs, and their queries."""

import re

_LOGIN = re.compile(r"(?<=://)[^/?#\s'\"]*@")
_QUERY = re.compile(r"(://[^\s?'\"]*\?)[^\s'\"]+")
_BARE_LOGIN = re.compile(r"(?<![^\s'\"(=])[^\s:/@'\"(=]+:(?!//)[^\s@'\"]+@")
HIDDEN = "..."


def redacted(text: str) -> str:
    """The text with ``...`` for the user and password, and for the query (it may hold a key), of each URL in it."""
    text = _LOGIN.sub(f"{HIDDEN}@", text)
    return _BARE_LOGIN.sub(f"{HIDDEN}@", _QUERY.sub(rf"\1{HIDDEN}", text))


def redacted_command(words: list[str]) -> list[str]:
    """A command line as it was typed, without keys, the values of headers, and logins in URLs."""
    shown, hidden = [], False
    for word in words:
        option, equals, _ = word.partition("=")
        secret = option in ("--api-key", "--header")
        shown.append(HIDDEN if hidden else f"{option}={HIDDEN}" if secret and equals else redacted(word))
        hidden = secret and not equals
    return shown
