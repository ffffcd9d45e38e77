"""Records of a server whose laws are known, made without a server: times by formula, noise by choice."""

import random
from collections.abc import Sequence

from biphase.client.record import Chunk, Record

A_S, B_S, C_S = 30e-3, 0.1e-3, 2e-9
T0_S, W_S, K_S = 8e-3, 0.5e-3, 1e-7


class LawServer:
    """Prefills alone and decodes together, by the laws; ``noise``: relative, of each pass and of each step.

    ``late``: seconds, at most, by which the client sees each chunk late; ``http``: seconds on top of each prefill.
    """

    def __init__(self, seed: int, noise: float = 0.01, late: float = 2e-4, http: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.noise, self.late, self.http = noise, late, http
        self.now = 100.0

    def _jitter(self, seconds: float) -> float:
        return seconds * max(0.2, self.rng.gauss(1.0, self.noise))

    def _seen(self) -> float:
        return self.now + self.rng.random() * self.late

    def prefill_s(self, tokens: int) -> float:
        return A_S + B_S * tokens + C_S * tokens**2

    def together(self, prompts: Sequence[int], tokens: int, name: str = "r") -> list[Record]:
        """All sent at once; prefilled one after the other; then every step a token for each that is prefilled."""
        sent = self.now
        stamps: list[list[Chunk]] = [[] for _ in prompts]
        for number, prompt in enumerate(prompts):
            self.now += self._jitter(self.prefill_s(prompt)) + self.http
            stamps[number].append(Chunk(self._seen(), 1, "text"))
        while any(len(stamp) < tokens for stamp in stamps):
            running = [i for i, stamp in enumerate(stamps) if len(stamp) < tokens]
            contexts = sum(prompts[i] + len(stamps[i]) for i in running)
            self.now += self._jitter(T0_S + W_S * len(running) + K_S * contexts)
            for i in running:
                stamps[i].append(Chunk(self._seen(), 1, "text"))
        self.now += 1.0
        return [
            Record(
                id=f"{name}-{i}",
                intended=sent,
                sent=sent,
                first_byte=sent + self.http + self.rng.random() * self.late,
                chunks=tuple(stamps[i]),
                ended=stamps[i][-1].t,
                prompt_tokens=prompt,
                prompt_tokens_source="usage",
                completion_tokens=tokens,
                completion_tokens_source="usage",
                asked_prompt_tokens=prompt,
                asked_completion_tokens=tokens,
            )
            for i, prompt in enumerate(prompts)
        ]

    def profile(self, lengths: Sequence[int] = (1, 16, 128, 512, 2048), repeats: int = 5) -> list[Record]:
        """One request at a time, as the default profile sends them."""
        order = [length for length in lengths for _ in range(repeats)]
        self.rng.shuffle(order)
        return [record for length in order for record in self.together([length], 32)]

    def grid(self, repeats: int = 2) -> list[Record]:
        """Batches of 2, 4 and 8 with short and long contexts."""
        cells = [(batch, length) for batch in (2, 4, 8) for length in (16, 512)] * repeats
        return [record for batch, length in cells for record in self.together([length] * batch, 32)]
