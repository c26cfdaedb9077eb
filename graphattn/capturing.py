"""capture(): from a model and what the caller asks for to an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from graphattn.dcp import DCP
from graphattn.draft import Speculation
from graphattn.engine import Engine
from graphattn.errors import wrong
from graphattn.fitting import resolve_measured
from graphattn.foreign.contract import ForeignAttention
from graphattn.models import adapt, notes
from graphattn.report import Progress, reporter
from graphattn.sizing import Options
from graphattn.stream import open_stream


def capture(
    model: object,
    max_batch: int,
    *,
    max_seq_len: int | None = None,
    max_tokens: int | None = None,
    page_size: int = 64,
    num_pages: int | None = None,
    memory_budget: int | None = None,
    buckets: Sequence[int] | None = None,
    backend: str = "auto",
    kv_dtype: torch.dtype | None = None,
    dcp: DCP | None = None,
    speculate: Speculation | None = None,
    attention: ForeignAttention | None = None,
    run_ahead: int = 2,
    max_queue: int = 4096,
    prefix_reuse: bool = True,
    prepack: bool = True,
    debug: bool = False,
    fuse: bool = True,
    progress: bool | Progress = False,
) -> Engine:
    """Capture the whole decode step of `model` as one graph per bucket.

    Args:
        model: a transformers causal LM, or a model that meets
            `graphattn.models.contract.StepModel`; in eval mode. It is not changed.
        max_batch: requests that run at once (slots).
        max_seq_len: tokens of one request, prompt and output. Default: the model's maximum,
            reduced to what fits in the pages, which the report then says.
        max_tokens: token places of a step that holds prefill rows. Default 512 on a CPU, 2,048
            on a GPU.
        page_size: KV positions of a page, a power of two.
        num_pages: pages of KV over all requests. Default: what `memory_budget` holds.
        memory_budget: bytes of KV pages. Default: 2 GiB on a CPU (committed as it is written),
            on a GPU what the largest step leaves of 90 % of
            the free memory; never more than all slots can use.
        buckets: row counts for which a decode graph is captured, ascending, ending with
            `max_batch`. Default: powers of two.
        backend: "cuda", "host" (record and replay on a CPU), "eager" (no graph), or "auto".
        kv_dtype: of the KV pages, the model's by default. torch.float8_e4m3fn holds twice the
            tokens of bfloat16 in the same memory, with an error: docs/fp8.md. The scales are the
            model's (`AttentionLayer`), 1 where it has none.
        dcp: shard the KV cache of every request over a group of ranks.
        speculate: `NGram(k)`, `DraftModel(model, k)` or `MTP(k)`: draft tokens, verified in the
            next step.
        attention: an attention kernel of others that serves the model in ours' place, such as
            `graphattn.foreign.sdpa.SDPA()`; docs/foreign-kernels.md. A drafter keeps ours.
        run_ahead: steps that may be launched before their results are read, 1 to 4.
        max_queue: requests that may wait for a slot.
        prefix_reuse: requests share the KV of equal prefixes, in whole units of
            `graphattn.bounds.prefix_unit` tokens.
        prepack: host backend, float32: pack the weights of linears for the CPU. Costs a second
            copy of them; weights updated in place are packed anew.
        debug: every attention layer checks, on the device and inside the graph, that the metadata
            it reads was derived since lengths last changed; docs/capture-tools.md. What fails is
            a `CaptureError` or a `StepError` that names layer and tensor. Some 25 small operations
            a layer.
        fuse: run fused operations in place of a transformers model's own, where they compute the
            same: docs/fusion.md. It moves projections of one input together in memory. The report
            lists what was fused, and what was not and why.
        progress: True for lines on stderr, or a callable (bucket name, done, total).

    Raises:
        ConfigError: a wrong argument, or bounds that do not fit in the memory that is free; then
            it says what takes how much, and nothing was allocated.
        UnsupportedModelError: the model cannot be served.
    """
    step_model = adapt(model, fuse=_checked(fuse))
    if getattr(model, "training", False):
        raise wrong("model", "a model in eval mode", "training mode", "Call model.eval() first.")
    stream = open_stream(step_model.device)
    config = resolve_measured(
        Options(
            max_batch=max_batch,
            max_seq_len=max_seq_len,
            max_tokens=max_tokens,
            page_size=page_size,
            num_pages=num_pages,
            memory_budget=memory_budget,
            buckets=buckets,
            backend=backend,
            kv_dtype=kv_dtype,
            dcp=dcp,
            speculate=speculate,
            attention=attention,
            run_ahead=run_ahead,
            max_queue=max_queue,
            prefix_reuse=prefix_reuse,
            prepack=prepack,
            debug=debug,
        ),
        step_model,
        stream,
    )
    drafter = getattr(config.speculate, "module", getattr(config.speculate, "model", None))
    drafts = tuple(f"draft: {note}" for note in notes(drafter))
    config = replace(config, notes=(*notes(step_model), *drafts, *config.notes))
    return Engine(step_model, config, stream, reporter(progress))


def _checked(fuse: object) -> bool:
    if not isinstance(fuse, bool):
        raise wrong("fuse", "True or False", fuse, "Leave it out to fuse what can be fused.")
    return fuse
