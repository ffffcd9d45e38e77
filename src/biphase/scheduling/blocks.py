"""One pool of KV blocks: who holds which, and how many are free.

A request's block table owns its blocks from allocation to release; nothing else frees them::

    token   0        16       32       48
            | block 7 | block 2 | block 9 |         request.blocks = [7, 2, 9]
            |- computed (KV written) -|.. |         num_computed = 35
                                       ^^^ room for tokens that are known but not computed yet
"""

from collections.abc import Iterable


class BlockPool:
    """Blocks with ids 0 to ``num_blocks - 1``; those freed last are handed out first, while the cache is warm."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a KV pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """``count`` free blocks. Ask ``num_free`` first: too few is a bug of the caller."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for and {len(self._free)} free")
        blocks = [self._free.pop() for _ in range(count)]
        self._held.update(blocks)
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back, tail first, so that the head of a sequence is reused last."""
        for block in reversed(list(blocks)):
            self._held.remove(block)
            self._free.append(block)

    def check(self, held: Iterable[int]) -> None:
        """Integrity: free and held blocks make up the pool, and ``held`` are exactly the blocks of live requests."""
        held = list(held)
        if len(held) != len(set(held)) or set(held) != self._held:
            raise AssertionError("the blocks of live requests are not the blocks that the pool gave out")
        if sorted([*self._free, *held]) != list(range(self.num_blocks)):
            raise AssertionError("free and held blocks do not make up the pool")
