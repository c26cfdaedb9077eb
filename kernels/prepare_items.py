"""Work lists of a step: the part of `prepare` with one program per row that writes its items.

A row finds its place in a sorted list by counting the entries of the rows before it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fill_tail(ptr, begin, end, value: tl.constexpr, i_part, parts, BLOCK: tl.constexpr):
    """This program's part of writing `value` to [begin, end)."""
    for first in range(begin + i_part * BLOCK, end, parts * BLOCK):
        index = first + tl.arange(0, BLOCK)
        tl.store(ptr + index, tl.full([BLOCK], value, ptr.dtype.element_ty), mask=index < end)


@triton.jit
def _items_before(key, count, my_key, row, i_row):
    """Entries that rows before i_row have in a list sorted by descending key, then by row."""
    before = (key > my_key) | ((key == my_key) & (row < i_row))
    return tl.sum(tl.where(before, count, 0), 0)


@triton.jit
def _at(vector, row, i_row):
    """vector[i_row] of a vector [ROWS] whose elements are non-negative."""
    return tl.max(tl.where(row == i_row, vector, 0), 0)


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def item_kernel(
    query_len_ptr,
    row_begin_ptr,
    row_end_ptr,
    row_chunk_ptr,
    row_splits_ptr,
    decode_items_ptr,
    decode_count_ptr,
    prefill_items_ptr,
    prefill_count_ptr,
    num_rows,
    num_blocks,
    GROUPS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PREFILL_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row: its entries of every work list, and its part of their tails."""
    i_row = tl.program_id(0)
    row = tl.arange(0, ROWS)
    m_row = row < num_rows
    end = tl.load(row_end_ptr + row, mask=m_row, other=0)  # [ROWS]

    for g in tl.static_range(GROUPS):
        o_row = g * num_rows + row
        begin = tl.load(row_begin_ptr + o_row, mask=m_row, other=0)
        chunk = tl.load(row_chunk_ptr + o_row, mask=m_row, other=0)
        splits = tl.load(row_splits_ptr + o_row, mask=m_row, other=0)
        work = tl.minimum(tl.maximum(end - begin, 0), chunk)
        first_item = _items_before(work, splits, _at(work, row, i_row), row, i_row)
        split = tl.arange(0, SPLITS)
        m_split = split < _at(splits, row, i_row)
        p_decode = decode_items_ptr + (g * num_rows * MAX_SPLITS + first_item + split) * 2
        tl.store(p_decode, tl.zeros([SPLITS], tl.int32) + i_row, mask=m_split)
        tl.store(p_decode + 1, split, mask=m_split)

    splits = tl.load(row_splits_ptr + row, mask=m_row, other=0)
    query_len = tl.load(query_len_ptr + row, mask=m_row, other=0)
    blocks = tl.where(splits > 0, 0, tl.cdiv(query_len, PREFILL_BLOCK))  # decode rows have splits
    first_item = _items_before(end, blocks, _at(end, row, i_row), row, i_row)
    my_blocks = _at(blocks, row, i_row)
    for first in range(0, my_blocks, BLOCK):
        i = first + tl.arange(0, BLOCK)
        p_prefill = prefill_items_ptr + (first_item + i) * 2
        tl.store(p_prefill, tl.zeros([BLOCK], tl.int32) + i_row, mask=i < my_blocks)
        tl.store(p_prefill + 1, my_blocks - 1 - i, mask=i < my_blocks)  # longest first

    for g in tl.static_range(GROUPS):
        p_items = decode_items_ptr + g * num_rows * MAX_SPLITS * 2
        used = tl.load(decode_count_ptr + g)
        fill_tail(p_items, used * 2, num_rows * MAX_SPLITS * 2, -1, i_row, num_rows, BLOCK)
    used = tl.load(prefill_count_ptr)
    fill_tail(prefill_items_ptr, used * 2, num_blocks * 2, -1, i_row, num_rows, BLOCK)
