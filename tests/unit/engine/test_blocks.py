"""The books of blocks balance after anything; a prefix is found only where all of it is kept."""

from __future__ import annotations

import random

import pytest

from herder.engine.blocks import BlockGroup, BlockPool, BlockTable, KvBlocks, block_hash
from herder.model.attention_spec import AttentionSpec

SIZE = 4


def names_of(ids: list[int], identity: bytes = b"") -> list[bytes]:
    """The hashes of the whole blocks of a text."""
    names = [block_hash(b"", (), identity)]
    for start in range(0, len(ids) - SIZE + 1, SIZE):
        names.append(block_hash(names[-1], ids[start : start + SIZE]))
    return names[1:]


def group(num_blocks: int, kind: str = "full", window: int = 0) -> BlockGroup:
    reach = AttentionSpec(kind, window, 1.0).first_visible
    return BlockGroup(reach, num_blocks, num_blocks)


def blocks_of(*groups: BlockGroup) -> KvBlocks:
    return KvBlocks(groups or [group(8)], block_size=SIZE)


def written(blocks: KvBlocks, ids: list[int]) -> BlockTable:
    """A sequence that computed these tokens at once."""
    table = blocks.open(names_of(ids))
    assert blocks.grow(table, start=len(table) * SIZE, end=len(ids))
    blocks.name(table, names_of(ids))
    return table


def states(blocks: KvBlocks) -> list[tuple[int, int, int]]:
    return [(pool.num_free, pool.num_cached, pool.num_referenced) for pool in blocks.pools]


def test_a_name_depends_on_all_that_keys_depend_on() -> None:
    ids = list(range(8))
    first, second = names_of(ids)
    assert names_of([*ids, 9]) == [first, second]
    assert names_of([0, 1, 2, 9, 4, 5, 6, 7])[1] != second
    assert names_of(ids, b"salt")[0] != first
    assert block_hash(first, ids[4:], b"image") != second


def test_a_prefix_is_found_again_in_the_same_blocks() -> None:
    blocks = blocks_of()
    table = written(blocks, list(range(10)))
    held = list(table.blocks[0])
    blocks.close(table)
    assert states(blocks) == [(6, 2, 0)]
    again = blocks.open(names_of([*range(8), 50, 51, 52, 53]))
    assert list(again.blocks[0]) == held[:2]
    assert states(blocks) == [(6, 0, 2)]


def test_blocks_are_shared_while_both_go_on_and_kept_by_the_last() -> None:
    blocks = blocks_of()
    one, other = (written(blocks, list(range(8))) for _ in "ab")
    assert one.blocks == other.blocks
    assert blocks.grow(one, start=8, end=9)
    assert one.blocks[0][:2] == other.blocks[0]
    blocks.close(one)
    assert states(blocks) == [(6, 0, 2)]
    blocks.close(other)
    assert states(blocks) == [(6, 2, 0)]


def test_the_least_recently_used_goes_first_and_of_one_text_its_end() -> None:
    blocks = blocks_of(group(4))
    old, new = [1] * 8, [2] * 8
    for ids in (old, new, old):
        blocks.close(written(blocks, ids))
    table = written(blocks, [3] * 4)
    assert [len(blocks.open(names_of(ids)).blocks[0]) for ids in (old, new)] == [2, 1]
    blocks.close(table)


def test_nothing_is_taken_where_not_all_can_be_had() -> None:
    blocks = blocks_of(group(8), group(2, "sliding", 4))
    table = blocks.open([])
    assert not blocks.grow(table, start=0, end=12)
    assert states(blocks) == [(8, 0, 0), (2, 0, 0)]


@pytest.mark.parametrize(
    ("kind", "window", "seen_at_13"), [("sliding", 5, 2), ("chunked", 8, 2), ("sliding", 14, 0)]
)
def test_what_a_window_no_longer_sees_is_let_go(kind: str, window: int, seen_at_13: int) -> None:
    blocks = blocks_of(group(8), group(8, kind, window))
    table = blocks.open([])
    for position in range(14):
        assert blocks.grow(table, start=position, end=position + 1)
    assert [pool.num_referenced for pool in blocks.pools] == [4, 4 - seen_at_13]
    blocks.close(table)
    assert states(blocks) == [(8, 0, 0)] * 2


def test_a_prefix_is_as_long_as_every_group_still_has_what_it_sees() -> None:
    blocks = blocks_of(group(8), group(4, "sliding", 5))
    ids = list(range(16))
    table = blocks.open([])
    for position in range(16):
        assert blocks.grow(table, start=position, end=position + 1)
        blocks.name(table, names_of(ids[: position + 1]))
    blocks.close(table)
    found = blocks.open(names_of(ids))
    assert (len(found), found.first_held) == (4, [0, 3])
    # Of the second group, only the last block is needed to go on from here.
    other = blocks.open([])
    assert blocks.grow(other, start=0, end=12)
    blocks.close(found)
    assert len(blocks.open(names_of(ids[:12]))) == 0
    assert len(blocks.open(names_of(ids))) == 4


def test_a_block_released_too_often_is_our_bug() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.release(block)
    with pytest.raises(AssertionError, match="too often"):
        pool.release(block)


@pytest.mark.parametrize("seed", range(20))
def test_the_books_balance_after_any_history(seed: int) -> None:
    """Sequences of a few texts grow, shrink to nothing and come back, in pools that are too small;
    a block that is found always holds what was written under its name."""
    draw = random.Random(seed)
    blocks = blocks_of(group(draw.randint(4, 12)), group(draw.randint(4, 12), "sliding", 6))
    content: list[dict[int, bytes]] = [{} for _ in blocks.pools]
    alive: list[tuple[list[int], BlockTable, int]] = []
    for _ in range(300):
        if alive and draw.random() < 0.4:
            _, table, _ = alive.pop(draw.randrange(len(alive)))
            blocks.close(table)
        else:
            ids = [draw.randint(0, 1) for _ in range(draw.randint(1, 20))]
            names = names_of(ids)
            table = blocks.open(names)
            for pool, held, first in zip(content, table.blocks, table.first_held, strict=True):
                assert [pool[block] for block in held[first:]] == names[first : len(held)]
            position = len(table) * SIZE
            while position < len(ids):
                end = min(len(ids), position + draw.randint(1, 5))
                if not blocks.grow(table, start=position, end=end):
                    break
                done = names_of(ids[:end])
                for pool, held, first in zip(content, table.blocks, table.first_held, strict=True):
                    for index in range(max(first, position // SIZE), len(held)):
                        pool[held[index]] = done[index] if index < len(done) else b""
                blocks.name(table, done)
                position = end
            alive.append((ids, table, position))
        for number, pool in enumerate(blocks.pools):
            assert pool.num_free + pool.num_cached + pool.num_referenced == pool.num_blocks
            held = [t.blocks[number][t.first_held[number] :] for _, t, _ in alive]
            assert pool.num_referenced == len({block for each in held for block in each})
    for _, table, _ in alive:
        blocks.close(table)
    assert all(pool.num_referenced == 0 for pool in blocks.pools)
