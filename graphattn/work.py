"""What an attention call reads of a step, the workspace of its splits, and checks of both."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from graphattn.arguments import FP8, FP32, INT32, Arguments, check_number
from graphattn.errors import wrong


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """What an attention call reads of a step: rows, visible ranges and work lists.

    `StepBuffers.work` gives that of a layer. On a CPU the ranges alone are used; a GPU walks the
    work lists. Contents may change between replays.
    """

    page_table: Tensor  # [slots, columns], any row stride
    slot_of_row: Tensor  # [B], row of the page table; -1 = padding row
    query_start: Tensor  # [B + 1], first token place of each row
    visible_start: Tensor  # [T]
    visible_end: Tensor  # [T]; equal to visible_start or less: the token sees nothing
    row_begin: Tensor  # [B]
    row_end: Tensor  # [B]
    row_chunk: Tensor  # [B]
    row_splits: Tensor  # [B]
    decode_items: Tensor  # [B * S, 2]
    decode_count: Tensor  # [1]
    prefill_items: Tensor | None  # [items, 2]; None: no row of the step is a prefill row
    prefill_count: Tensor | None  # [1]
    decode_query_len: int  # Q
    prefill_block: int  # query places of a prefill item

    def derived(self) -> dict[str, Tensor | None]:
        """What is derived anew in every step, by name: all but the page table and the slots."""
        names = [f.name for f in fields(self)[2:-2]]
        return {name: getattr(self, name) for name in names}


class Partials(NamedTuple):
    """Workspace of split decode rows, written and read within one call. Shared by all layers."""

    out: Tensor  # [B, S, Q, Hq, Dv] fp32
    lse: Tensor  # [B, S, Q, Hq] fp32

    @staticmethod
    def allocate(work: AttentionWork, heads: int, value_dim: int) -> Partials:
        """For calls with `heads` query heads whose outputs are `value_dim` wide."""
        rows = work.slot_of_row.shape[0]
        splits = work.decode_items.shape[0] // rows
        shape = (rows, splits, work.decode_query_len, heads)
        device = work.slot_of_row.device
        return Partials(
            torch.zeros(*shape, value_dim, dtype=torch.float32, device=device),
            torch.zeros(shape, dtype=torch.float32, device=device),
        )


def in_schema_order(work: AttentionWork) -> list[Tensor | None]:
    """The tensors in the order of the raw operations."""
    return [getattr(work, f.name) for f in fields(work)[:-2]]


def take_work(args: Arguments, work: AttentionWork) -> None:
    """Check a step's work against the sizes T that `args` has."""
    check_number("work.decode_query_len", work.decode_query_len, least=1)
    check_number("work.prefill_block", work.prefill_block, least=1)
    args.take("work.page_table", work.page_table, ("slots", "columns"), INT32)
    for name in ("slot_of_row", "row_begin", "row_end", "row_chunk", "row_splits"):
        args.take(f"work.{name}", getattr(work, name), ("B",), INT32, "contiguous")
    rows = args.sizes["B"]
    args.take("work.query_start", work.query_start, (rows + 1,), INT32, "contiguous")
    for name in ("visible_start", "visible_end"):
        args.take(f"work.{name}", getattr(work, name), ("T",), INT32, "contiguous")
    items = args.take("work.decode_items", work.decode_items, ("B * S", 2), INT32, "contiguous")
    if rows == 0 or items.shape[0] == 0 or items.shape[0] % rows:
        raise wrong(
            "work.decode_items",
            f"a positive multiple of the {rows} rows",
            items.shape[0],
            "Allocate B * max_splits items.",
        )
    args.take("work.decode_count", work.decode_count, (1,), INT32, "contiguous")
    if (work.prefill_items is None) != (work.prefill_count is None):
        raise wrong(
            "work.prefill_items",
            "it and work.prefill_count, or neither",
            "one of them",
            "Pass both, or None for a step of decode rows alone.",
        )
    if work.prefill_items is not None:
        args.take("work.prefill_items", work.prefill_items, ("items", 2), INT32, "contiguous")
        args.take("work.prefill_count", work.prefill_count, (1,), INT32, "contiguous")


def take_results(
    args: Arguments,
    work: AttentionWork,
    partials: Partials,
    out: Tensor,
    lse: Tensor,
    width: str,
    dtype: torch.dtype,
) -> None:
    """Check partials and results of Hq heads of size `width`, a name that `args` has."""
    splits = work.decode_items.shape[0] // args.sizes["B"]
    places = ("B", splits, work.decode_query_len, "Hq")
    outs, lses = partials
    args.take("partials.out", outs, (*places, width), FP32, "contiguous")
    args.take("partials.lse", lses, places, FP32, "contiguous")
    args.take("out", out, ("T", "Hq", width), (dtype,), "contiguous")
    args.take("lse", lse, ("T", "Hq"), FP32, "contiguous")


def take_pools(
    args: Arguments,
    k_pool: Tensor,
    v_pool: Tensor,
    dtype: torch.dtype,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    *,
    written: bool = False,
) -> None:
    """Check K and V pools, float `dtype` or FP8, and the scales of FP8 entries."""
    layout = ("pages", "Hkv", "page_size", "D")
    args.take("k_pool", k_pool, layout, (dtype, FP8), written=written)
    args.take("v_pool", v_pool, layout, (k_pool.dtype,), written=written)
    for name, factor in (("k_scale", k_scale), ("v_scale", v_scale)):
        if factor is not None:
            take_scale(args, name, factor, (1, args.sizes["Hkv"]), k_pool)


def take_scale(
    args: Arguments, name: str, factor: Tensor, lengths: tuple[int, ...], pool: Tensor
) -> None:
    """Check the scale of an FP8 pool, of one of `lengths`."""
    if pool.dtype != FP8:
        raise wrong(name, "None for pools that are not FP8", "a tensor", "Leave it out.")
    args.take(name, factor, (f"{name}s",), FP32, "contiguous")
    if factor.shape[0] not in lengths:
        sizes = " or ".join(f"[{n}]" for n in lengths)
        raise wrong(name, f"shape {sizes}", list(factor.shape), "See `kv_write`, `latent_write`.")
