"""Stop strings in a text that arrives in pieces, wherever the pieces are cut."""


class _Pattern:
    """Knuth, Morris and Pratt: ``matched`` letters of the pattern are a suffix of the text read so far."""

    __slots__ = ("fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text, self.matched = text, 0
        self.fallback = [0] * len(text)
        length = 0
        for position in range(1, len(text)):
            while length and text[position] != text[length]:
                length = self.fallback[length - 1]
            length += text[position] == text[length]
            self.fallback[position] = length

    def read(self, letter: str) -> bool:
        """Take one letter; true when it completes the pattern, after which nothing more may be read."""
        while self.matched and letter != self.text[self.matched]:
            self.matched = self.fallback[self.matched - 1]
        self.matched += letter == self.text[self.matched]
        return self.matched == len(self.text)


class StopStrings:
    """Passes text on until a stop string is complete, and keeps back only what may still become one.

    The string that is complete first wins, the longest of those that end together; the text ends before it. So the
    result depends on the text alone, not on how tokens cut it.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._patterns = [_Pattern(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that is safe to show now; nothing more after a match."""
        if not self._patterns:
            return text
        for position, letter in enumerate(text):
            complete = [pattern for pattern in self._patterns if pattern.read(letter)]
            if complete:
                self.matched = complete[0].text
                return (self._held + text[: position + 1])[: -len(self.matched)]
        whole = self._held + text
        keep = max(pattern.matched for pattern in self._patterns)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def flush(self) -> str:
        """What was kept back, when the end has come without a match."""
        held, self._held = self._held, ""
        return held
