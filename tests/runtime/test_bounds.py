"""Context-parallel arithmetic against counting, and the checks of `Bounds`."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphattn.bounds import (
    Bounds,
    ceil_div,
    global_position,
    kv_place,
    local_length,
    local_position,
    max_local_length,
    owner,
    prefix_unit,
    tokens_in_shard,
)
from graphattn.errors import ConfigError

GOOD = {
    "max_batch": 4,
    "max_seq_len": 64,
    "max_tokens": 16,
    "page_size": 16,
    "num_pages": 8,
    "vocab_size": 100,
}

groups = st.tuples(st.integers(1, 8), st.integers(1, 64))


def bounds(**changes: int) -> Bounds:
    return Bounds(**(GOOD | changes))


@pytest.mark.parametrize("W", range(1, 9))
@pytest.mark.parametrize("I", [1, 2, 3, 5, 16, 64])
def test_local_lengths_equal_a_count_of_owned_positions(W: int, I: int) -> None:
    held = [0] * W
    for L in range(4 * W * I + 1):
        lengths = [local_length(L, r, W, I) for r in range(W)]
        assert lengths == held
        assert max_local_length(L, W, I) == max(held)
        assert lengths == sorted(lengths, reverse=True), "a higher rank never holds more"
        r = owner(L, W, I)
        assert local_position(L, W, I) == held[r], "local positions are contiguous"
        assert global_position(held[r], r, W, I) == L
        held[r] += 1


@given(groups, st.integers(0, 10_000), st.data())
def test_visibility_is_a_prefix_on_every_rank(
    group: tuple[int, int], p: int, data: st.DataObject
) -> None:
    W, I = group
    r = data.draw(st.integers(0, W - 1))
    c = data.draw(st.integers(0, 10_000 // W))
    visible = global_position(c, r, W, I) <= p
    assert visible == (c < local_length(p + 1, r, W, I))


@pytest.mark.parametrize(
    ("W", "I", "L", "longest"), [(2, 2, 2, 2), (8, 64, 64, 64), (2, 2, 6, 4), (2, 2, 18, 10)]
)
def test_longest_shard_is_not_the_average(W: int, I: int, L: int, longest: int) -> None:
    """ceil(L / W) is right only for interleave 1; buffers sized by it overflow."""
    assert max_local_length(L, W, I) == longest
    assert max_local_length(L, W, I) <= ceil_div(L, W * I) * I


def test_expansion_to_queries_comes_before_localization() -> None:
    assert [local_length(n, 1, 2, 1) for n in (8, 9, 10)] == [4, 4, 5]


def test_pages_are_planned_from_the_longest_shard() -> None:
    lengths = [local_length(513, r, 8, 1) for r in range(8)]
    assert [ceil_div(n, 64) for n in lengths] == [2, 1, 1, 1, 1, 1, 1, 1]
    assert bounds(page_size=64, dcp_size=8, max_seq_len=1024, num_pages=2).pages_for(513) == 2
    assert (
        bounds(page_size=64, dcp_size=2, max_seq_len=1_048_576, num_pages=8192).pages_per_seq
        == 8192
    )


@given(st.integers(1, 4), st.integers(1, 20), st.sampled_from([4, 8, 16]))
def test_prefix_unit_is_the_smallest_that_fills_pages_on_all_ranks(
    W: int, I: int, page: int
) -> None:
    def fills(n: int) -> bool:
        return all(local_length(n, r, W, I) % page == 0 for r in range(W)) and (
            len({local_length(n, r, W, I) for r in range(W)}) == 1
        )

    unit = prefix_unit(page, W, I)
    assert fills(unit)
    assert unit == next(n for n in range(1, W * math.lcm(page, I) + 1) if fills(n))


@pytest.mark.parametrize("name", sorted(GOOD))
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4", None])
def test_a_bound_that_is_no_positive_integer_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}: wanted an integer >= 1"):
        bounds(**{name: value})  # type: ignore[arg-type]


def test_contradicting_bounds_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_tokens: wanted at least max_batch"):
        bounds(max_batch=8, max_tokens=7)
    with pytest.raises(ConfigError, match="num_pages: wanted the 5 pages of one sequence"):
        bounds(max_seq_len=65, num_pages=4)
    with pytest.raises(ConfigError, match="dcp_rank"):
        bounds(dcp_size=2, dcp_rank=2)


def test_derived_sizes() -> None:
    b = bounds(max_drafts=2)
    assert (b.decode_query_len, b.decode_tokens, b.pages_per_seq) == (3, 12, 4)
    assert (b.logits_places(5), b.logits_places(16)) == (5, 12)
    assert b.max_kv_len(10) == 13
    assert b.max_kv_len(64) == 64, "never beyond max_seq_len"


@given(groups, st.integers(1, 200))
def test_the_longest_sequence_of_a_shard(group: tuple[int, int], entries: int) -> None:
    W, I = group
    longest = tokens_in_shard(entries, W, I)
    assert max_local_length(longest, W, I) <= entries
    assert max_local_length(longest + 1, W, I) > entries


@given(groups, st.sampled_from([1, 4, 16, 64]))
def test_no_two_tokens_share_a_place(group: tuple[int, int], page_size: int) -> None:
    W, I = group
    places = [kv_place(p, W, I, page_size) for p in range(4 * W * I)]
    assert len(set(places)) == len(places)
    assert all(0 <= x.rank < W and 0 <= x.offset < page_size for x in places)
    for rank in range(W):
        flat = [x.column * page_size + x.offset for x in places if x.rank == rank]
        assert flat == list(range(len(flat))), "in order, without a gap"
