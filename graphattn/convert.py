"""Between our metadata and the conventions of other engines and kernels, on the device.

    ours                                    others
    query_len, context_len [B]              cu_seqlens [B + 1], seqused [B]    (flash-attn varlen)
    page_table [slots, P], slot_of_row [B]  block_table [B, P], by row
    page_table, lengths [B]                 indptr [B + 1], indices [N], last_page_len [B]
                                            (FlashInfer)
    kv_slot [T] int64, -1 = none            slot_mapping [T], negative = padding    (vLLM)

Each function has static shapes and reads nothing on the host, so it can be part of a captured step.
Inputs are contiguous int32 or int64 on one device; tables may have any row stride. Results go into
`out`, which overlaps no input, or a new tensor; in a captured step `out` saves memory, nothing
else. Entries without a meaning are 0, an index in bounds, unless said. Wrong shapes, dtypes or
devices raise `ConfigError` before anything is written; contents are not checked: lengths that are
longer than a table or a bound are cut where it ends.

B row places, T token places, P columns, N entries of a buffer for page ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphattn.arguments import INT32, INT64, Arguments, check_number

__all__ = [
    "PagedIndices",
    "block_table_from_pages",
    "block_table_of_rows",
    "context_lengths",
    "cu_seqlens",
    "kv_slots",
    "paged_indices",
    "paged_lengths",
    "positions",
    "query_lengths",
    "rows_of_tokens",
    "seqused",
    "slot_mapping",
]

_INTS = (torch.int32, torch.int64)


class PagedIndices(NamedTuple):
    """Pages of each row, one row after the other. int32."""

    indptr: Tensor  # [B + 1], first entry of each row in `indices`
    indices: Tensor  # [N] page ids, 0 from indptr[B] on
    last_page_len: Tensor  # [B], entries of the row's last page; 0 of a row without pages


def cu_seqlens(query_len: Tensor, *, out: Tensor | None = None) -> Tensor:
    """First token place of each row, and their number: [B + 1] int32 of query_len [B]."""
    args = Arguments()
    args.take("query_len", query_len, ("B",), _INTS, "contiguous")
    out = _into(args, out, (args.sizes["B"] + 1,), torch.int32, query_len)
    out[:1].zero_()
    out[1:].copy_(query_len.cumsum(0))
    return out


def query_lengths(cu_seqlens: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Token places of each row: [B] int32 of cu_seqlens [B + 1]."""
    args = Arguments()
    args.take("cu_seqlens", cu_seqlens, ("B + 1",), _INTS, "contiguous")
    out = _into(args, out, (cu_seqlens.shape[0] - 1,), torch.int32, cu_seqlens)
    return out.copy_(cu_seqlens.diff())


def seqused(query_len: Tensor, context_len: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Tokens of each row's sequence after this step, [B] int32; 0 of a row without places.

    A causal mask that is aligned at the end of `seqused` is that of our visible ranges only if all
    query_len places of a row hold a token. Where they may not (missing drafts, rows that have
    ended), the ranges themselves say what each token sees.
    """
    args = Arguments()
    args.take("query_len", query_len, ("B",), _INTS, "contiguous")
    args.take("context_len", context_len, ("B",), _INTS, "contiguous")
    out = _into(args, out, (args.sizes["B"],), torch.int32, query_len)
    return out.copy_(torch.where(query_len > 0, context_len + query_len, 0))


def context_lengths(cu_seqlens: Tensor, seqused: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Tokens of each row that were cached before this step: [B] int32."""
    args = Arguments()
    args.take("seqused", seqused, ("B",), _INTS, "contiguous")
    rows = args.sizes["B"]
    args.take("cu_seqlens", cu_seqlens, (rows + 1,), _INTS, "contiguous")
    out = _into(args, out, (rows,), torch.int32, seqused)
    return out.copy_((seqused - cu_seqlens.diff()).clamp_(min=0))


def rows_of_tokens(cu_seqlens: Tensor, tokens: int, *, out: Tensor | None = None) -> Tensor:
    """Row of each of `tokens` places, [T] int32; -1 past the last row."""
    args = Arguments()
    args.take("cu_seqlens", cu_seqlens, ("B + 1",), _INTS, "contiguous")
    check_number("tokens", tokens, least=0)
    out = _into(args, out, (tokens,), torch.int32, cu_seqlens)
    row = _segments(cu_seqlens, tokens)
    return out.copy_(torch.where(row < cu_seqlens.shape[0] - 1, row, -1))


def positions(
    cu_seqlens: Tensor, context_len: Tensor, tokens: int, *, out: Tensor | None = None
) -> Tensor:
    """Position of each place's token in its sequence, [T] int64; 0 past the last row."""
    args = Arguments()
    args.take("context_len", context_len, ("B",), _INTS, "contiguous")
    rows = args.sizes["B"]
    args.take("cu_seqlens", cu_seqlens, (rows + 1,), _INTS, "contiguous")
    check_number("tokens", tokens, least=0)
    out = _into(args, out, (tokens,), torch.int64, context_len)
    row = _segments(cu_seqlens, tokens)
    first = (context_len - cu_seqlens[:-1]).index_select(0, row.clamp(max=rows - 1))
    place = torch.arange(tokens, device=row.device)
    return out.copy_(torch.where(row < rows, first + place, 0))


def block_table_of_rows(
    page_table: Tensor, slot_of_row: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """The page table by row: [B, P] int32 of page_table [slots, P]; 0 in rows of slot -1."""
    args = Arguments()
    args.take("page_table", page_table, ("slots", "P"), _INTS)
    args.take("slot_of_row", slot_of_row, ("B",), _INTS, "contiguous")
    out = _into(args, out, (args.sizes["B"], args.sizes["P"]), torch.int32, page_table)
    table = page_table.index_select(0, slot_of_row.clamp(min=0))
    return out.copy_(torch.where((slot_of_row >= 0)[:, None], table, 0))


def paged_indices(
    block_table: Tensor,
    lengths: Tensor,
    page_size: int,
    *,
    max_indices: int | None = None,
    out: PagedIndices | None = None,
) -> PagedIndices:
    """The pages of rows of `lengths` [B] tokens, one row after the other.

    block_table [B, P]. `max_indices`, N, is the size of a new `indices`, B * P by default; as many
    as a pool has pages suffice where no two rows share one. The local lengths of a DCP rank give
    its indices.
    """
    args = Arguments()
    args.take("block_table", block_table, ("B", "P"), _INTS)
    args.take("lengths", lengths, ("B",), _INTS, "contiguous")
    check_number("page_size", page_size, least=1)
    rows, columns = args.sizes["B"], args.sizes["P"]
    if out is None:
        size = rows * columns if max_indices is None else max_indices
        check_number("max_indices", size, least=0)
        new = (block_table.new_empty(n, dtype=torch.int32) for n in (rows + 1, size, rows))
        out = PagedIndices(*new)
    _take_paged(args, out, "out.", INT32)
    count = _ceil_div(lengths, page_size).clamp_(max=columns)
    cu_seqlens(count, out=out.indptr)
    size = out.indices.shape[0]
    row = _segments(out.indptr, size)
    inside = row.clamp(max=rows - 1)
    column = torch.arange(size, device=row.device) - out.indptr[:-1].index_select(0, inside)
    pages = block_table[inside, column.clamp_(min=0, max=columns - 1)]
    out.indices.copy_(torch.where(row < rows, pages, 0))
    last = lengths - (count - 1) * page_size
    out.last_page_len.copy_(torch.where(count > 0, last.clamp_(max=page_size), 0))
    return out


def paged_lengths(paged: PagedIndices, page_size: int, *, out: Tensor | None = None) -> Tensor:
    """Tokens of each row, [B] int32."""
    args = Arguments()
    check_number("page_size", page_size, least=1)
    _take_paged(args, paged, "paged.", _INTS)
    out = _into(args, out, (args.sizes["B"],), torch.int32, paged.indptr)
    count = paged.indptr.diff()
    return out.copy_(torch.where(count > 0, (count - 1) * page_size + paged.last_page_len, 0))


def block_table_from_pages(
    paged: PagedIndices, columns: int, *, out: Tensor | None = None
) -> Tensor:
    """[B, columns] int32 with the pages of each row; 0 beyond them."""
    args = Arguments()
    check_number("columns", columns, least=1)
    _take_paged(args, paged, "paged.", _INTS)
    out = _into(args, out, (args.sizes["B"], columns), torch.int32, paged.indptr)
    if paged.indices.shape[0] == 0:
        return out.zero_()
    column = torch.arange(columns, device=paged.indptr.device)
    index, last = paged.indptr[:-1, None] + column, paged.indices.shape[0] - 1
    held = (index < paged.indptr[1:, None]) & (index <= last)
    return out.copy_(torch.where(held, paged.indices[index.clamp_(min=0, max=last)], 0))


def slot_mapping(
    block_table: Tensor,
    row_of_token: Tensor,
    positions: Tensor,
    page_size: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Entry of each token: [T] int64, page * page_size + offset, -1 where row_of_token [T] is -1.

    block_table [B, P], positions [T]; on a DCP rank positions are local, and row_of_token is -1
    where another rank owns the token.
    """
    args = Arguments()
    args.take("block_table", block_table, ("B", "P"), _INTS)
    args.take("row_of_token", row_of_token, ("T",), _INTS, "contiguous")
    args.take("positions", positions, ("T",), _INTS, "contiguous")
    check_number("page_size", page_size, least=1)
    out = _into(args, out, (args.sizes["T"],), torch.int64, block_table)
    used, columns = row_of_token >= 0, args.sizes["P"]
    column = torch.where(used, positions // page_size, 0).clamp_(min=0, max=columns - 1)
    page = block_table[row_of_token.clamp(min=0), column].long()
    return out.copy_(torch.where(used, page * page_size + positions % page_size, -1))


def kv_slots(slot_mapping: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`kv_slot` of our operations: [T] int64, -1 wherever slot_mapping [T] is negative."""
    args = Arguments()
    args.take("slot_mapping", slot_mapping, ("T",), _INTS, "contiguous")
    out = _into(args, out, (args.sizes["T"],), torch.int64, slot_mapping)
    return out.copy_(slot_mapping.clamp(min=-1))


def _into(
    args: Arguments,
    out: Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    like: Tensor,
) -> Tensor:
    """`out`, checked, or a new tensor of that shape."""
    if out is None:
        return torch.empty(shape, dtype=dtype, device=like.device)
    return args.take("out", out, shape, INT32 if dtype == torch.int32 else INT64, "contiguous")


def _take_paged(
    args: Arguments, paged: PagedIndices, prefix: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    args.take(f"{prefix}last_page_len", paged.last_page_len, ("B",), dtypes, "contiguous")
    rows = args.sizes["B"]
    args.take(f"{prefix}indptr", paged.indptr, (rows + 1,), dtypes, "contiguous")
    args.take(f"{prefix}indices", paged.indices, ("N",), dtypes, "contiguous")


def _segments(starts: Tensor, size: int) -> Tensor:
    """Segment of each of `size` places, [size] int64; starts [n + 1]; n past the last."""
    places = torch.arange(size, dtype=starts.dtype, device=starts.device)
    return torch.searchsorted(starts[1:], places, right=True)


def _ceil_div(a: Tensor, b: int) -> Tensor:
    return (a + (b - 1)) // b
