"""Which sequence holds which block of the key-value cache, and which blocks are kept for others.

A block is referenced by sequences, or cached (full, named by a hash, referenced by none and given
away when no free one is left, least recently used first), or free. Layers that see equally far
share a pool; pools go together: a prefix is found where every group has what it still sees of it.
Plain bookkeeping: nothing here knows tensors.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """What a group of layers has."""

    first_visible: Callable[[int], int]
    """The first position that a token at this one, or any later one, may see."""
    num_blocks: int
    most_held: int
    """Blocks that one sequence holds at once, at most."""


def block_hash(parent: bytes, token_ids: Sequence[int], identity: bytes = b"") -> bytes:
    """The name of a block by all that its keys and values depend on: the blocks before it, its
    token ids, and `identity`, whatever else makes them what they are."""
    return hashlib.sha256(parent + identity + array("q", token_ids).tobytes()).digest()


class BlockPool:
    """The blocks of one group of layers. free + cached + referenced = all, always."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks))
        self._name_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and that may be found again."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give."""
        return len(self._free) + len(self._cached)

    @property
    def num_referenced(self) -> int:
        """Blocks that somebody holds, counted one by one."""
        return sum(count > 0 for count in self._references)

    def __contains__(self, name: bytes) -> bool:
        return name in self._block_of

    def take(self) -> int:
        """A block for one sequence alone; the least recently used of the cached if none is free."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._name_of.pop(block)]
        self._references[block] = 1
        return block

    def share(self, name: bytes) -> int:
        """One more reference to the block of this name."""
        block = self._block_of[name]
        self._cached.pop(block, None)
        self._references[block] += 1
        return block

    def name(self, block: int, name: bytes) -> None:
        """Make a full block one that may be found, unless another has the name already."""
        if name not in self._block_of and block not in self._name_of:
            self._block_of[name] = block
            self._name_of[block] = name

    def release(self, block: int) -> None:
        """One reference less."""
        self._references[block] -= 1
        assert self._references[block] >= 0, f"block {block} was released too often"
        if self._references[block] == 0:
            if block in self._name_of:
                self._cached[block] = None
            else:
                self._free.append(block)


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence, in each group one for every `block_size` positions."""

    blocks: list[array[int]]
    """Where a group sees no more of a position, the number of a block that others may have."""
    first_held: list[int]
    """Of each group the first block that is still this sequence's."""
    num_named: int
    """Blocks that need no name any more."""

    def __len__(self) -> int:
        return len(self.blocks[0])


class KvBlocks:
    """The pools of all groups."""

    def __init__(self, groups: Sequence[BlockGroup], *, block_size: int) -> None:
        self.block_size = block_size
        self.groups = tuple(groups)
        self.pools = [BlockPool(group.num_blocks) for group in groups]

    def open(self, names: Sequence[bytes]) -> BlockTable:
        """A table that begins with the longest prefix of these blocks that is cached."""
        length = self._longest_cached(names)
        table = BlockTable([], [], length)
        first_seen = self._first_seen(length * self.block_size)
        for pool, first in zip(self.pools, first_seen, strict=True):
            held = [pool.share(name) for name in names[first:length]]
            table.blocks.append(array("q", [0] * first + held))
            table.first_held.append(first)
        return table

    def has_room(self, table: BlockTable, num_tokens: int) -> bool:
        """Whether blocks for num_tokens can be had now."""
        missing = self._num_blocks(num_tokens) - len(table)
        return all(
            min(missing, group.most_held) <= pool.num_available
            for group, pool in zip(self.groups, self.pools, strict=True)
        )

    def grow(self, table: BlockTable, *, start: int, end: int) -> bool:
        """Let go of what a token at `start` does not see, and hold blocks up to `end`, if all can
        be had; whether they can."""
        for group, first in enumerate(self._first_seen(start)):
            self._let_go(table, group, first)
        missing = self._num_blocks(end) - len(table)
        if any(pool.num_available < missing for pool in self.pools):
            return False
        for pool, blocks in zip(self.pools, table.blocks, strict=True):
            blocks.extend(pool.take() for _ in range(missing))
        return True

    def name(self, table: BlockTable, names: Sequence[bytes]) -> None:
        """The first len(names) blocks are full: they may be found by these names from now on."""
        for index in range(table.num_named, len(names)):
            for pool, blocks, first in zip(self.pools, table.blocks, table.first_held, strict=True):
                if index >= first:
                    pool.name(blocks[index], names[index])
        table.num_named = max(table.num_named, len(names))

    def close(self, table: BlockTable) -> None:
        """Give back all blocks."""
        for group in range(len(self.pools)):
            self._let_go(table, group, len(table))

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _first_seen(self, position: int) -> list[int]:
        """Of each group the first block that a token at `position` sees."""
        return [group.first_visible(position) // self.block_size for group in self.groups]

    def _let_go(self, table: BlockTable, group: int, end: int) -> None:
        # The last ones first: what begins a text is found by more sequences than what ends it.
        for index in range(end - 1, table.first_held[group] - 1, -1):
            self.pools[group].release(table.blocks[group][index])
        table.first_held[group] = max(table.first_held[group], end)

    def _longest_cached(self, names: Sequence[bytes]) -> int:
        length = len(names)
        while length:
            first_seen = self._first_seen(length * self.block_size)
            missing = [
                index
                for pool, first in zip(self.pools, first_seen, strict=True)
                for index in range(length - 1, first - 1, -1)
                if names[index] not in pool
            ]
            if not missing:
                return length
            # Shorter prefixes see at least as far back, so none that holds this block will do.
            length = max(missing)
        return 0
