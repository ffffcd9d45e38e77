"""One pool of KV blocks: who holds which, what the free ones still remember, and how many are free.

A request's block table holds a reference to each of its blocks from allocation to release; nothing else frees them::

    token   0        16       32       48
            | block 7 | block 2 | block 9 |         request.blocks = [7, 2, 9]
            |- computed (KV written) -|.. |         num_computed = 35
            |- shared ---------|               blocks 7 and 2 are full: published, others may hold them too
                               |- private -|   block 9 is this request's alone

A full block is published under the digest of its tokens and of all tokens before it. Released by its last holder it
is free but keeps its content, and is revived when a prompt begins with the same tokens. Blocks are released tail
first and forgotten in the order of release, so that heads, which more prompts share, live longest.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens that fill one block, and digests of everything before it and up to its end."""

    digest: bytes
    parent: bytes
    tokens: tuple[int, ...]


def next_piece(before: Piece | None, tokens: Sequence[int]) -> Piece:
    """The piece that follows ``before`` (None at the start): 128 bits of BLAKE2b, chained over the pieces."""
    parent = before.digest if before else b""
    digest = hashlib.blake2b(array("q", tokens).tobytes(), key=parent, digest_size=16).digest()
    return Piece(digest, parent, tuple(tokens))


class BlockPool:
    """Blocks with ids 0 to ``num_blocks - 1``, each free or held by one or more requests."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a KV pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))  # free, nothing worth keeping; last in, first out: warm
        self._kept: OrderedDict[int, None] = OrderedDict()  # free with content, the longest released first
        self._holders: dict[int, int] = {}
        self._contents: dict[int, Piece] = {}
        self._published: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, those with content included."""
        return len(self._blank) + len(self._kept)

    def allocate(self, count: int) -> list[int]:
        """``count`` free blocks, blank ones first. Ask ``num_free`` first: too few is a bug of the caller."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for and {self.num_free} free")
        blocks = [self._blank.pop() if self._blank else self._forget_oldest() for _ in range(count)]
        self._holders.update(dict.fromkeys(blocks, 1))
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block, tail first."""
        for block in reversed(list(blocks)):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            del self._holders[block]
            if block in self._contents:
                self._kept[block] = None
            else:
                self._blank.append(block)

    def match(self, pieces: Iterable[Piece]) -> list[int]:
        """The published blocks that hold the longest run of ``pieces`` from the first one on.

        Digests find a block and its tokens are then compared, so that no collision can pass off another's content.
        """
        found: list[int] = []
        for piece in pieces:
            block = self._published.get(piece.digest)
            if block is None or self._contents[block] != piece:
                break
            found.append(block)
        return found

    def num_kept(self, blocks: Iterable[int]) -> int:
        """How many of these published blocks are free now, and would be taken from the free ones by ``hold``."""
        return sum(block in self._kept for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Take one more reference to each of these blocks, in the same breath as the match that found them."""
        for block in blocks:
            self._kept.pop(block, None)
            self._holders[block] = self._holders.get(block, 0) + 1

    def publish(self, block: int, piece: Piece) -> None:
        """A held block is full and computed: let others find it. A second copy of a piece stays unpublished."""
        if piece.digest not in self._published and block not in self._contents:
            self._published[piece.digest] = block
            self._contents[block] = piece

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Integrity: blank, kept and held blocks make up the pool, and the holders are exactly the live tables."""
        counted: dict[int, int] = {}
        for table in tables:
            for block in table:
                counted[block] = counted.get(block, 0) + 1
        if counted != self._holders:
            raise AssertionError("the blocks of live requests are not the blocks that the pool gave out")
        if sorted([*self._blank, *self._kept, *self._holders]) != list(range(self.num_blocks)):
            raise AssertionError("blank, kept and held blocks do not make up the pool")
        if {content.digest: block for block, content in self._contents.items()} != self._published:
            raise AssertionError("a published block is not where its digest says")
        if any(block in self._contents for block in self._blank):
            raise AssertionError("a blank block is still published")

    def _forget_oldest(self) -> int:
        block, _ = self._kept.popitem(last=False)
        del self._published[self._contents.pop(block).digest]
        return block
