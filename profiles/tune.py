"""`python -m profiles.tune`: other tiles for this GPU, timed, and written into a tile table.

For each entry of the tables of `kernels/tiles.py` for this architecture, the most used first, other
tiles are tried in its place: compiled, compared with the table's own tile, which the tests check,
then timed in a graph. A tile is taken if it is 3 % faster. `--out` gets the file with the new
entries in place of the old: kernels/tiles.py itself, or a copy. Renew tests/kernels/budgets.json
afterwards; its test says how.

`--dry` runs the same on a CPU, whose kernels know no tiles: one variant of each entry of sm_90.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphattn import AttentionLayer, Bounds, StepBuffers
from graphattn.bounds import ceil_div
from graphattn.kernels import tiles
from profiles.attention import gqa, latent
from profiles.peaks import seconds
from profiles.place import Place
from profiles.record import ROOT

TILES = ROOT / "kernels" / "tiles.py"
GAIN = 0.97
WARPS, STAGES, BLOCKS_N, BLOCKS_M = (4, 8), (2, 3), (32, 64, 128), (64, 128)
PAGE_SIZE = 64
Values = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A place in a table of (warps, stages, block_n); of PREFILL, block_m, block_n and those.

    Its workload is `batch` rows of `length` tokens, the last `query_len` of them new.
    """

    table: str
    keys: tuple[int, ...]  # after the architecture
    layer: AttentionLayer
    query_len: int
    batch: int
    length: int

    @property
    def name(self) -> str:
        """As it stands in the file."""
        return f"{self.table}{''.join(f'[{key}]' for key in self.keys)}"

    def holder(self, arch: str) -> dict[int, Values]:
        """The innermost dictionary, which holds the entry under its last key."""
        found: Any = getattr(tiles, self.table)[arch]
        for key in self.keys[:-1]:
            found = found[key]
        holder: dict[int, Values] = found
        return holder

    def variants(self, current: Values) -> list[Values]:
        """What is tried in its place."""
        if self.table == "PREFILL":
            shapes = itertools.product(BLOCKS_M, BLOCKS_N, WARPS, STAGES)
            return [v for v in shapes if v != current]
        return [v for v in itertools.product(WARPS, STAGES, BLOCKS_N) if v != current]


def entries(dry: bool) -> list[Entry]:
    """Of a table, the most used first. Decode rows of block_m / 16 places have 16 heads each."""
    heads = {dim: gqa(128, 8, dim) for dim in (128, 64, 256)}
    sizes = {"batch": 2, "length": 40} if dry else {"batch": 32, "length": 4096}
    chunk = {"query_len": 24 if dry else 512} | sizes | {"batch": 1 if dry else 4}
    small = {64: gqa(16, 1, 64), 128: gqa(16, 1, 64), 256: gqa(16, 1, 64)} if dry else heads
    few = latent(16, 48, 40) if dry else latent(16)
    found = [
        Entry("DECODE", (128, 16), small[128], query_len=1, **sizes),
        Entry("LATENT", (64,), latent(64, 48, 40) if dry else latent(128), query_len=1, **sizes),
        Entry("LATENT", (16,), few, query_len=1, **sizes),
        Entry("PREFILL", (128,), small[128], **chunk),
        Entry("DECODE", (64, 16), small[64], query_len=1, **sizes),
        Entry("DECODE", (128, 32), small[128], query_len=2, **sizes),
        Entry("DECODE", (128, 64), small[128], query_len=4, **sizes),
        Entry("LATENT", (32,), few, query_len=2, **sizes),
        Entry("PREFILL", (64,), small[64], **chunk),
        Entry("DECODE", (256, 16), small[256], query_len=1, **sizes),
        Entry("DECODE", (64, 32), small[64], query_len=2, **sizes),
        Entry("DECODE", (256, 32), small[256], query_len=2, **sizes),
        Entry("PREFILL", (256,), small[256], **chunk),
    ]
    return found


@contextmanager
def in_table(entry: Entry, arch: str, values: Values) -> Iterator[None]:
    """The table has `values` inside the block."""
    holder, key = entry.holder(arch), entry.keys[-1]
    kept = holder[key]
    holder[key] = values
    try:
        yield
    finally:
        holder[key] = kept


def tune(place: Place, arch: str, limit: float) -> dict[Entry, Values]:
    """Entries that should change, with what; stops after `limit` seconds with what it has."""
    deadline = time.monotonic() + limit
    found: dict[Entry, Values] = {}
    for entry in entries(place.dry):
        if entry.keys[-1] not in entry.holder(arch):
            continue
        current = entry.holder(arch)[entry.keys[-1]]
        wanted, base = _measured(place, entry)
        best, best_s = current, base * GAIN
        variants = entry.variants(current)
        for values in variants[:1] if place.dry else variants:
            if time.monotonic() > deadline:
                print(f"{entry.name}: stopped, {limit:.0f} s are spent", flush=True)
                return found
            with in_table(entry, arch, values):
                taken = _tried(place, entry, values, wanted)
            if taken is not None and taken < best_s:
                best, best_s = values, taken
        print(f"{entry.name}: {current} {base * 1e6:.1f} us", end="", flush=True)
        print(f" -> {best} {best_s * 1e6:.1f} us" if best != current else ", kept", flush=True)
        if best != current:
            found[entry] = best
    return found


def _tried(place: Place, entry: Entry, values: Values, wanted: Tensor) -> float | None:
    """Seconds, or None with the reason printed."""
    try:
        out, taken = _measured(place, entry)
    except Exception as error:  # it does not fit, or the compiler fails: the next one may not
        print(f"{entry.name} {values}: {type(error).__name__} {str(error)[:100]}", flush=True)
        return None
    error_max, bound = float((out - wanted).abs().max()), _budget(wanted, place.dtype)
    if not error_max <= bound:
        print(f"{entry.name} {values}: WRONG, {error_max:.1e} beside {bound:.1e}", flush=True)
        return None
    return taken


def _budget(wanted: Tensor, dtype: torch.dtype) -> float:
    """Two tiles add in another order, and each rounds once; of probabilities, once more."""
    return 4 * torch.finfo(dtype).eps * float(wanted.abs().max())


def _measured(place: Place, entry: Entry) -> tuple[Tensor, float]:
    """Output and median seconds of the attention of one layer, work lists made for the tile."""
    step = _Step(place, entry)
    out = step.run().float().clone()
    taken = seconds(place.replayed(step.run), 3 if place.dry else 20, place.device)
    return out, statistics.median(taken)


class _Step:
    """Buffers and seeded contents of one workload."""

    def __init__(self, place: Place, entry: Entry) -> None:
        layer, batch, query_len = entry.layer, entry.batch, entry.query_len
        decode = entry.table != "PREFILL"
        tokens, columns = batch * query_len, ceil_div(entry.length, PAGE_SIZE)
        bounds = Bounds(
            batch,
            entry.length,
            max_tokens=tokens,
            page_size=PAGE_SIZE,
            num_pages=batch * columns,
            max_drafts=query_len - 1 if decode else 0,
        )
        draw = torch.Generator(place.device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=place.dtype, device=place.device, generator=draw)

        kv_heads = () if layer.value_dim else (layer.num_kv_heads,)
        pools = [
            normal(batch * columns, *kv_heads, PAGE_SIZE, layer.head_dim)
            for _ in range(1 if layer.value_dim else 2)
        ]
        whole = StepBuffers.allocate(
            bounds, [layer], dtype=place.dtype, device=place.device, pools=[tuple(pools)]
        )
        self.buffers, self.layer = whole.narrow(tokens, mixed=not decode), layer
        pages = torch.arange(batch * columns, dtype=torch.int32, device=place.device)
        self.buffers.page_table.copy_(pages.view(batch, columns))
        lengths = torch.full((batch,), query_len, dtype=torch.int32, device=place.device)
        self.buffers.prepare_lengths(lengths, entry.length - lengths)
        self.entry = [normal(tokens, *kv_heads, layer.head_dim) for _ in pools]
        self.q = normal(tokens, layer.num_q_heads, layer.head_dim)

    def run(self) -> Tensor:
        """[T, Hq, Dv], in a buffer."""
        if self.layer.value_dim:
            return self.buffers.attend_latent(0, self.q, *self.entry)
        return self.buffers.attend(0, self.q, *self.entry)


def rewritten(
    source: str, arch: str, changes: Sequence[tuple[str, tuple[int, ...], Values]]
) -> str:
    """`source` of the tables with new values at (table, keys); all else stays as it is.

    Raises `KeyError` for a table or a key that is not there.
    """
    spans = []
    for table, keys, values in changes:
        node = _table(source, table)
        for key in (arch, *keys):
            node = _item(node, key)
        spans.append((node.lineno - 1, node.col_offset, node.end_col_offset, repr(values)))
    lines = source.splitlines(keepends=True)
    for line, begin, end, text in sorted(spans, reverse=True):
        lines[line] = lines[line][:begin] + text + lines[line][end:]
    return "".join(lines)


def _table(source: str, table: str) -> ast.expr:
    for node in ast.parse(source).body:
        named = isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == table
        if named and isinstance(node, ast.AnnAssign) and node.value is not None:
            return node.value
    raise KeyError(table)


def _item(node: ast.expr, key: object) -> ast.expr:
    assert isinstance(node, ast.Dict)
    for at, value in zip(node.keys, node.values, strict=True):
        if isinstance(at, ast.Constant) and at.value == key:
            return value
    raise KeyError(key)


def main() -> int:
    """Tune, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=TILES, help="the file with the new tables")
    parser.add_argument("--seconds", type=float, default=1200, help="stop after that time")
    parser.add_argument("--dry", action="store_true", help="on the CPU, at small sizes")
    arguments = parser.parse_args()
    place = Place(torch.device("cpu" if arguments.dry else "cuda"), arguments.dry)
    arch = "sm_90" if arguments.dry else tiles.arch_of(place.device)
    if arch not in tiles.DECODE:
        print(f"{arch} has no tables of its own: add them to kernels/tiles.py first")
        return 1
    found = tune(place, arch, arguments.seconds)
    changes = [(entry.table, entry.keys, values) for entry, values in found.items()]
    arguments.out.write_text(rewritten(TILES.read_text(), arch, changes))
    print(f"{len(changes)} entries of {arch} changed in {arguments.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
