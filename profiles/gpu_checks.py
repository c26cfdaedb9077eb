"""Parts of `profiles/gpu.sh` that ask whether it is right: paths, options, memory.

A failure of one case is printed and recorded, and the next one runs.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import graphattn
from graphattn import DCP, MTP, DraftModel, NGram, VirtualGroup
from graphattn.bounds import ceil_div
from profiles.attention import DecodeAttention, decode_attention, gqa, latent
from profiles.place import Place, Record
from profiles.plain_llama import DEEPSEEK_V3, Shape, plain_llama
from tests.runtime.tiny_model import TinyModel
from tests.runtime.tiny_mtp import KnowingMTP, TinyTarget
from tests.runtime.tiny_recurrent import TinyRecurrent

PATHS = {
    "gqa-64": Shape(),
    "mha-80": Shape(heads=3, kv_heads=3, head_dim=80),
    "gqa-96": Shape(head_dim=96),
    "gqa-128-of-9": Shape(heads=9, kv_heads=3, head_dim=128),
    "mqa-256-of-16": Shape(heads=16, kv_heads=1, head_dim=256),
    "windows": Shape(layers=3, windows=(0, 24, 8)),
    "softcap": Shape(softcap=30.0),
    "sinks": Shape(sinks=True, windows=(16, 0)),
    "latent-48-of-5": Shape(heads=5, kv_heads=1, head_dim=48, value_dim=40, windows=(0, 24)),
    "latent-576-of-16": replace(DEEPSEEK_V3, layers=2, hidden=64, heads=16, vocab=251),
    "latent-576-of-128": replace(DEEPSEEK_V3, layers=2, hidden=64, vocab=251),
}
FP8 = torch.float8_e4m3fn
SMALL: dict[str, Any] = {"head_dim": 64, "hidden": 48}
LATENT = Shape(heads=5, kv_heads=1, head_dim=48, value_dim=40)


def _tiny(**options: Any) -> TinyModel:
    return TinyModel(**SMALL, **options)


def _mtp(depth: int) -> tuple[TinyModel, dict[str, Any]]:
    target = TinyTarget(**SMALL)
    return target, {"speculate": MTP(3, KnowingMTP(target, depth))}


# Each makes a model on the default device, and the options that it is captured with.
OPTIONS: dict[str, Callable[[], tuple[TinyModel, dict[str, Any]]]] = {
    "lookup": lambda: (_tiny(), {"speculate": NGram(3)}),
    "draft-model": lambda: (_tiny(), {"speculate": DraftModel(_tiny(windows=(4,)), 2)}),
    "mtp-one-module": lambda: _mtp(1),
    "mtp-chain": lambda: _mtp(3),
    "dcp-ag_rs": lambda: (_tiny(sinks=True), {"dcp": DCP(VirtualGroup(4), 3, "ag_rs")}),
    "dcp-a2a": lambda: (_tiny(sinks=True), {"dcp": DCP(VirtualGroup(2), 16, "a2a")}),
    "fp8": lambda: (_tiny(), {"kv_dtype": FP8}),
    "slot-tensors": lambda: (TinyRecurrent(**SMALL), {}),
    "slot-tensors-lookup": lambda: (TinyRecurrent(**SMALL), {"speculate": NGram(2)}),
    "dcp-fp8-lookup": lambda: (
        _tiny(),
        {"dcp": DCP(VirtualGroup(2), 1, "ag_rs"), "kv_dtype": FP8, "speculate": NGram(3)},
    ),
    "run-ahead-preempting": lambda: (
        _tiny(),
        {"run_ahead": 4, "prefix_reuse": False, "num_pages": 8},
    ),
}
# Attention whose every access is watched: few heads, lengths around a page.
MEMORY = {
    "gqa-64": gqa(4, 2, 64),
    "gqa-128-of-9": gqa(9, 3, 128),
    "mqa-256-of-16": gqa(16, 1, 256),
    "latent-48-of-5": latent(5, 48, 40),
    "latent-576-of-16": latent(16),
}
LENGTHS = (1, 15, 16, 17, 100, 33)
HUGE_PAGE = 2**30


def paths(place: Place) -> list[Record]:
    """Capture every path of the attention; replay must emit the tokens of the eager step."""
    return [_case("paths", name, partial(_path, place, shape)) for name, shape in PATHS.items()]


def options(place: Place) -> list[Record]:
    """Capture every option; replay must equal eager bit for bit, and emit its tokens."""
    return [_case("options", name, partial(_option, place, make)) for name, make in OPTIONS.items()]


def memory(place: Place) -> list[Record]:
    """What a row must not see is NaN, what it must not touch is unchanged."""
    return [
        _case("memory", name, partial(_watched, place, layer)) for name, layer in MEMORY.items()
    ]


def _case(part: str, name: str, run: Callable[[], Record]) -> Record:
    try:
        found = run()
    except Exception as error:
        traceback.print_exc()
        found = {"ok": False, "error": repr(error)[:500]}
    print(f"{part} {name}: {'right' if found['ok'] else 'WRONG'}", flush=True)
    return {"part": part, "case": name} | found


def _path(place: Place, shape: Shape) -> Record:
    model = plain_llama(shape, max_seq_len=160, device=place.device, dtype=place.dtype)
    return _beside_eager(place, model, {"max_tokens": 48}, verify=False)


def _option(place: Place, make: Callable[[], tuple[TinyModel, dict[str, Any]]]) -> Record:
    with torch.device(place.device):
        model, given = make()
    small = {"max_tokens": 64, "prepack": False, "buckets": [4]}
    return _beside_eager(place, model, small | given, verify=True)


def _beside_eager(place: Place, model: Any, given: Mapping[str, Any], *, verify: bool) -> Record:
    """Tokens of the graphs and of the eager step; with `verify`, their bits as well."""
    vocab, count = model.vocab_size, 6 if place.dry else 24
    # Below, at and above a page and a prefill chunk.
    lengths = (1, 16, 17, 64) if place.dry else (1, 15, 16, 17, 40, 64)
    prompts = [[(7 * i + j) % vocab for j in range(n)] for i, n in enumerate(lengths)]
    with _captured(model, given, "eager") as engine:
        eager = [done.token_ids for done in engine.generate(prompts, max_new_tokens=count)]
    with _captured(model, given, "auto") as engine:
        replayed = [done.token_ids for done in engine.generate(prompts, max_new_tokens=count)]
        report = engine.report()
        verified = engine.verify(4 if place.dry else 20) if verify else None
    print(f"tokens {'equal' if replayed == eager else 'DIFFER FROM'} eager\n{report}\n")
    print("" if verified is None else f"{verified}\n")
    buckets = {b.name: [b.nodes, b.capture_seconds, b.memory_bytes] for b in report.buckets}
    return {"ok": replayed == eager and (verified is None or verified.ok), "buckets": buckets}


def _captured(model: Any, given: Mapping[str, Any], backend: str) -> graphattn.Engine:
    return graphattn.capture(model, max_batch=4, page_size=16, backend=backend, **given)


def _watched(place: Place, layer: graphattn.AttentionLayer) -> Record:
    problem = decode_attention(
        layer, LENGTHS, max_seq_len=256, page_size=16, dtype=place.dtype, device=place.device
    )
    problem.run()
    wanted, budget = problem.exact(), problem.budget()
    hidden = _hide(problem)
    before = [pool.clone() for pool in problem.pools]
    out = problem.run()
    place.synchronize()
    error = float((out.double() - wanted).abs().max())
    moved = sum(_changed(a, b, hidden) for a, b in zip(before, problem.pools, strict=True))
    print(f"error {error:.1e} of {budget:.1e}; {moved} hidden values changed")
    return {"ok": error <= budget and not moved, "error": error, "budget": budget, "moved": moved}


def _hide(problem: DecodeAttention) -> Tensor:
    """Fill what no row sees: entries past each row's end and whole pages with NaN, page-table
    columns past each row's pages with ids of no page. Returns the entries, bool [pages, page_size].
    """
    table, page_size = problem.buffers.page_table, problem.pools[0].shape[-2]
    hidden = torch.ones(problem.pools[0].shape[0], page_size, dtype=torch.bool, device=table.device)
    for row, length in enumerate(problem.lengths):
        columns = ceil_div(length, page_size)
        positions = torch.arange(length, device=table.device)
        hidden[table[row, positions // page_size].long(), positions % page_size] = False
        table[row, columns:] = HUGE_PAGE
    for pool in problem.pools:
        pool.movedim(-2, 1)[hidden] = float("nan")
    return hidden


def _changed(before: Tensor, after: Tensor, hidden: Tensor) -> int:
    """Hidden values whose bits differ."""
    bits = torch.int16 if before.itemsize == 2 else torch.int32
    a, b = (pool.view(bits).movedim(-2, 1)[hidden] for pool in (before, after))
    return int((a != b).sum())
