"""Oracle of `ops.prepare`: one place at a time, shards by counting."""

from __future__ import annotations

from torch import Tensor


def prepare_ref(
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
    """Derive tokens, visible ranges, logits places and work lists of a step."""
    max_seq_len = history.shape[1]

    held = [p for p in range(max_seq_len) if p // interleave % dcp_size == dcp_rank]

    def local_length(length: int) -> int:
        return sum(p < length for p in held)

    for padding, outputs in (
        (0, (input_ids, positions, visible_start, visible_end, logits_token)),
        (0, (logits_count, row_begin, row_end, row_splits)),
        (-1, (row_of_token, kv_slot, decode_items, prefill_items)),
    ):
        for output in outputs:
            output.fill_(padding)

    place, logits_place = 0, 0
    decode_rows: list[int] = []
    prefill_rows: list[int] = []
    for row, (slot, length) in enumerate(
        zip(slot_of_row.tolist(), query_len.tolist(), strict=True)
    ):
        query_start[row] = place
        logits_start[row] = logits_place
        live = slot >= 0 and int(finish[slot]) == 0
        context = int(context_len[slot]) if live else 0
        seq = int(seq_len[slot]) if live else 0
        tokens: list[int] = []  # positions
        for j in range(length):
            row_of_token[place + j] = row
            p = context + j
            if not live or p >= seq + int(draft_count[slot]) or p >= max_seq_len:
                continue
            tokens.append(p)
            t = place + j
            input_ids[t] = history[slot, p] if p < seq else draft_tokens[slot, p - seq]
            positions[t] = p
            if p in held:
                c = held.index(p)
                page = int(page_table[slot, c // page_size])
                kv_slot[t] = page * page_size + c % page_size
            visible_end[t] = local_length(p + 1)
            for g, window in enumerate(windows):
                visible_start[g, t] = local_length(max(0, p + 1 - window)) if window else 0
        token_count[row] = len(tokens)

        if tokens and tokens[-1] >= seq - 1:
            wanted = [p for p in tokens if p >= seq - 1]
            logits_count[row] = len(wanted)
            for i, p in enumerate(wanted):
                logits_token[logits_place + i] = place + p - context

        if tokens:
            mine = slice(place, place + len(tokens))
            row_end[row] = int(visible_end[mine].max())
            for g in range(len(windows)):
                row_begin[g, row] = int(visible_start[g, mine].min()) // align * align
        prefill = context < int(prompt_len[slot]) if live else length > 1 + max_drafts
        if length:
            (prefill_rows if prefill else decode_rows).append(row)
        place += length
        logits_place += min(length, 1 + max_drafts)
    query_start[-1] = place
    logits_start[-1] = logits_place

    for g in range(len(windows)):
        ranked = []
        for row in range(len(slot_of_row)):
            span = max(0, int(row_end[row]) - int(row_begin[g, row]))
            size = chunk
            while -(-span // size) > max_splits:
                size *= 2
            row_chunk[g, row] = size
            if row in decode_rows:
                row_splits[g, row] = max(1, -(-span // size))
                ranked.append((-min(span, size), row))
        items = [(r, i) for _, r in sorted(ranked) for i in range(int(row_splits[g, r]))]
        for i, (row, split) in enumerate(items):
            decode_items[g, i, 0] = row
            decode_items[g, i, 1] = split
        decode_count[g] = len(items)

    blocks = [
        (row, block)
        for row in sorted(prefill_rows, key=lambda row: (-int(row_end[row]), row))
        for block in reversed(range(-(-int(query_len[row]) // prefill_block)))
    ]
    for i, (row, block) in enumerate(blocks):
        prefill_items[i, 0] = row
        prefill_items[i, 1] = block
    prefill_count[0] = len(blocks)
