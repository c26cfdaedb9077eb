"""Metadata of a step on the device: see `ops.prepare`.

Three launches. `_scan_kernel` is one program over all rows: what needs a prefix sum, and the
ranges and splits of each row. The others have one program per row: `_place_kernel` writes the
row's token and logits places, `item_kernel` its entries of the work lists. A row finds its
place in a sorted list by counting the entries of the rows before it, so nothing is sorted.
What lies past the last row is shared out over the programs.

Everything the host fixes at capture is a constexpr; nothing that depends on the bucket is.
A row without tokens loads nothing through its slot, which may be -1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dcp_math import local_length, local_position, owner
from .layout import check_contiguous, check_rows
from .prepare_items import fill_tail, item_kernel

BLOCK = 512  # places of one vector


@triton.jit(do_not_specialize=["num_rows", "max_seq_len"])
def _scan_kernel(
    slot_of_row_ptr,
    query_len_ptr,
    context_len_ptr,
    seq_len_ptr,
    prompt_len_ptr,
    finish_ptr,
    draft_count_ptr,
    query_start_ptr,
    token_count_ptr,
    logits_start_ptr,
    logits_count_ptr,
    row_begin_ptr,
    row_end_ptr,
    row_chunk_ptr,
    row_splits_ptr,
    decode_count_ptr,
    prefill_count_ptr,
    num_rows,
    max_seq_len,
    WINDOWS: tl.constexpr,
    MAX_DRAFTS: tl.constexpr,
    DCP_SIZE: tl.constexpr,
    DCP_RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PREFILL_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    m_row = row < num_rows
    slot = tl.load(slot_of_row_ptr + row, mask=m_row, other=-1)  # [ROWS]
    places = tl.load(query_len_ptr + row, mask=m_row, other=0)
    live = tl.load(finish_ptr + slot, mask=slot >= 0, other=4) == 0
    context = tl.load(context_len_ptr + slot, mask=live, other=0)
    seq = tl.load(seq_len_ptr + slot, mask=live, other=0)
    prompt = tl.load(prompt_len_ptr + slot, mask=live, other=0)
    drafts = tl.load(draft_count_ptr + slot, mask=live, other=0)

    available = tl.minimum(seq + drafts, max_seq_len) - context
    count = tl.minimum(tl.maximum(available, 0), places)  # 0 where not live
    end = context + count
    tl.store(token_count_ptr + row, count, mask=m_row)
    tl.store(query_start_ptr, 0)
    tl.store(query_start_ptr + 1 + row, tl.cumsum(places, 0), mask=m_row)

    wanted = tl.where((count > 0) & (end >= seq), end - seq + 1, 0)
    reserved = tl.minimum(places, 1 + MAX_DRAFTS)
    tl.store(logits_count_ptr + row, wanted, mask=m_row)
    tl.store(logits_start_ptr, 0)
    tl.store(logits_start_ptr + 1 + row, tl.cumsum(reserved, 0), mask=m_row)

    prefill = tl.where(live, context < prompt, places > 1 + MAX_DRAFTS) & (places > 0)
    decode = (places > 0) & (prefill == 0)
    blocks = tl.where(prefill, tl.cdiv(places, PREFILL_BLOCK), 0)
    tl.store(prefill_count_ptr, tl.sum(blocks, 0))

    # Visible ranges grow with the position: the first token has the smallest start.
    last = tl.where(count > 0, local_length(end, DCP_SIZE, DCP_RANK, INTERLEAVE), 0)
    tl.store(row_end_ptr + row, last, mask=m_row)
    for g in tl.static_range(len(WINDOWS)):
        begin = tl.zeros([ROWS], tl.int32)
        if WINDOWS[g] > 0:
            start = tl.maximum(context + 1 - WINDOWS[g], 0)
            begin = local_length(start, DCP_SIZE, DCP_RANK, INTERLEAVE) // ALIGN * ALIGN
            begin = tl.where(count > 0, begin, 0)
        span = tl.maximum(last - begin, 0)
        chunk = tl.full([ROWS], CHUNK, tl.int32)
        while tl.max(tl.cdiv(span, chunk), 0) > MAX_SPLITS:
            chunk = tl.where(tl.cdiv(span, chunk) > MAX_SPLITS, chunk * 2, chunk)
        splits = tl.where(decode, tl.maximum(tl.cdiv(span, chunk), 1), 0)
        o_row = g * num_rows + row
        tl.store(row_begin_ptr + o_row, begin, mask=m_row)
        tl.store(row_chunk_ptr + o_row, chunk, mask=m_row)
        tl.store(row_splits_ptr + o_row, splits, mask=m_row)
        tl.store(decode_count_ptr + g, tl.sum(splits, 0))


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "num_logits", "history_stride", "table_stride"]
)
def _place_kernel(
    slot_of_row_ptr,
    context_len_ptr,
    seq_len_ptr,
    history_ptr,
    draft_tokens_ptr,
    page_table_ptr,
    query_start_ptr,
    token_count_ptr,
    logits_start_ptr,
    logits_count_ptr,
    input_ids_ptr,
    positions_ptr,
    row_of_token_ptr,
    kv_slot_ptr,
    visible_start_ptr,
    visible_end_ptr,
    logits_token_ptr,
    num_rows,
    num_tokens,
    num_logits,
    history_stride,
    table_stride,
    WINDOWS: tl.constexpr,
    MAX_DRAFTS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DCP_SIZE: tl.constexpr,
    DCP_RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    LOGITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0)
    slot = tl.load(slot_of_row_ptr + i_row).to(tl.int64)
    start = tl.load(query_start_ptr + i_row)
    places = tl.load(query_start_ptr + i_row + 1) - start
    count = tl.load(token_count_ptr + i_row)
    context = tl.load(context_len_ptr + slot, mask=count > 0, other=0)
    seq = tl.load(seq_len_ptr + slot, mask=count > 0, other=0)

    for first in range(0, places, BLOCK):
        j = first + tl.arange(0, BLOCK)  # [BLOCK]
        m_place = j < places
        m_token = j < count
        p = context + j
        t = start + j
        m_history = m_token & (p < seq)
        m_draft = m_token & (p >= seq)
        token = tl.load(history_ptr + slot * history_stride + p, mask=m_history, other=0)
        o_draft = slot * max(MAX_DRAFTS, 1) + p - seq
        token += tl.load(draft_tokens_ptr + o_draft, mask=m_draft, other=0)
        c = local_position(p, DCP_SIZE, INTERLEAVE)
        m_own = m_token & (owner(p, DCP_SIZE, INTERLEAVE) == DCP_RANK)
        page = tl.load(page_table_ptr + slot * table_stride + c // PAGE_SIZE, mask=m_own, other=0)
        entry = page.to(tl.int64) * PAGE_SIZE + c % PAGE_SIZE
        visible = local_length(p + 1, DCP_SIZE, DCP_RANK, INTERLEAVE)
        tl.store(row_of_token_ptr + t, tl.zeros([BLOCK], tl.int32) + i_row, mask=m_place)
        tl.store(input_ids_ptr + t, token.to(tl.int64), mask=m_place)
        tl.store(positions_ptr + t, tl.where(m_token, p, 0).to(tl.int64), mask=m_place)
        tl.store(kv_slot_ptr + t, tl.where(m_own, entry, -1), mask=m_place)
        tl.store(visible_end_ptr + t, tl.where(m_token, visible, 0), mask=m_place)
        for g in tl.static_range(len(WINDOWS)):
            begin = tl.zeros([BLOCK], tl.int32)
            if WINDOWS[g] > 0:
                begin = tl.maximum(p + 1 - WINDOWS[g], 0)
                begin = local_length(begin, DCP_SIZE, DCP_RANK, INTERLEAVE)
                begin = tl.where(m_token, begin, 0)
            tl.store(visible_start_ptr + g * num_tokens + t, begin, mask=m_place)

    first_logits = tl.load(logits_start_ptr + i_row)
    reserved = tl.load(logits_start_ptr + i_row + 1) - first_logits
    i = tl.arange(0, LOGITS)
    wanted = i < tl.load(logits_count_ptr + i_row)
    token_place = tl.where(wanted, start + seq - 1 - context + i, 0)
    tl.store(logits_token_ptr + first_logits + i, token_place.to(tl.int64), mask=i < reserved)

    used = tl.load(query_start_ptr + num_rows)
    fill_tail(input_ids_ptr, used, num_tokens, 0, i_row, num_rows, BLOCK)
    fill_tail(positions_ptr, used, num_tokens, 0, i_row, num_rows, BLOCK)
    fill_tail(row_of_token_ptr, used, num_tokens, -1, i_row, num_rows, BLOCK)
    fill_tail(kv_slot_ptr, used, num_tokens, -1, i_row, num_rows, BLOCK)
    fill_tail(visible_end_ptr, used, num_tokens, 0, i_row, num_rows, BLOCK)
    for g in tl.static_range(len(WINDOWS)):
        p_start = visible_start_ptr + g * num_tokens
        fill_tail(p_start, used, num_tokens, 0, i_row, num_rows, BLOCK)
    used_logits = tl.load(logits_start_ptr + num_rows)
    fill_tail(logits_token_ptr, used_logits, num_logits, 0, i_row, num_rows, BLOCK)


def prepare(
    slot_of_row: Tensor,
    query_len: Tensor,
    context_len: Tensor,
    seq_len: Tensor,
    prompt_len: Tensor,
    finish: Tensor,
    history: Tensor,
    draft_tokens: Tensor,
    draft_count: Tensor,
    page_table: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    row_of_token: Tensor,
    kv_slot: Tensor,
    visible_start: Tensor,
    visible_end: Tensor,
    query_start: Tensor,
    token_count: Tensor,
    logits_start: Tensor,
    logits_count: Tensor,
    logits_token: Tensor,
    row_begin: Tensor,
    row_end: Tensor,
    row_chunk: Tensor,
    row_splits: Tensor,
    decode_items: Tensor,
    decode_count: Tensor,
    prefill_items: Tensor,
    prefill_count: Tensor,
    windows: list[int],
    max_drafts: int,
    page_size: int,
    dcp_size: int,
    dcp_rank: int,
    interleave: int,
    align: int,
    chunk: int,
    max_splits: int,
    prefill_block: int,
) -> None:
    """Derive tokens, visible ranges, logits places and work lists of a step.

    Raises `ValueError` that names a tensor of another dtype or not contiguous; `history` and
    `page_table` can have any row stride.
    """
    check_contiguous(
        torch.int32,
        slot_of_row=slot_of_row,
        query_len=query_len,
        context_len=context_len,
        seq_len=seq_len,
        prompt_len=prompt_len,
        finish=finish,
        draft_tokens=draft_tokens,
        draft_count=draft_count,
        row_of_token=row_of_token,
        visible_start=visible_start,
        visible_end=visible_end,
        query_start=query_start,
        token_count=token_count,
        logits_start=logits_start,
        logits_count=logits_count,
        row_begin=row_begin,
        row_end=row_end,
        row_chunk=row_chunk,
        row_splits=row_splits,
        decode_items=decode_items,
        decode_count=decode_count,
        prefill_items=prefill_items,
        prefill_count=prefill_count,
    )
    check_contiguous(
        torch.int64,
        input_ids=input_ids,
        positions=positions,
        kv_slot=kv_slot,
        logits_token=logits_token,
    )
    check_rows(torch.int32, history=history, page_table=page_table)
    num_rows = slot_of_row.shape[0]
    max_seq_len = history.shape[1]
    rows = triton.next_power_of_2(num_rows)
    _scan_kernel[(1,)](
        slot_of_row,
        query_len,
        context_len,
        seq_len,
        prompt_len,
        finish,
        draft_count,
        query_start,
        token_count,
        logits_start,
        logits_count,
        row_begin,
        row_end,
        row_chunk,
        row_splits,
        decode_count,
        prefill_count,
        num_rows,
        max_seq_len,
        WINDOWS=tuple(windows),
        MAX_DRAFTS=max_drafts,
        DCP_SIZE=dcp_size,
        DCP_RANK=dcp_rank,
        INTERLEAVE=interleave,
        ALIGN=align,
        CHUNK=chunk,
        MAX_SPLITS=max_splits,
        PREFILL_BLOCK=prefill_block,
        ROWS=rows,
        num_warps=4,
    )
    _place_kernel[(num_rows,)](
        slot_of_row,
        context_len,
        seq_len,
        history,
        draft_tokens,
        page_table,
        query_start,
        token_count,
        logits_start,
        logits_count,
        input_ids,
        positions,
        row_of_token,
        kv_slot,
        visible_start,
        visible_end,
        logits_token,
        num_rows,
        input_ids.shape[0],
        logits_token.shape[0],
        history.stride(0),
        page_table.stride(0),
        WINDOWS=tuple(windows),
        MAX_DRAFTS=max_drafts,
        PAGE_SIZE=page_size,
        DCP_SIZE=dcp_size,
        DCP_RANK=dcp_rank,
        INTERLEAVE=interleave,
        LOGITS=triton.next_power_of_2(1 + max_drafts),
        BLOCK=BLOCK,
        num_warps=4,
    )
    item_kernel[(num_rows,)](
        query_len,
        row_begin,
        row_end,
        row_chunk,
        row_splits,
        decode_items,
        decode_count,
        prefill_items,
        prefill_count,
        num_rows,
        prefill_items.shape[0],
        GROUPS=len(windows),
        MAX_SPLITS=max_splits,
        PREFILL_BLOCK=prefill_block,
        ROWS=rows,
        SPLITS=triton.next_power_of_2(max_splits),
        BLOCK=BLOCK,
        num_warps=4,
    )
