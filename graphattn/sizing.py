"""From what the caller asked for to an `EngineConfig`: every bound, and the choices made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from graphattn.arguments import FP8
from graphattn.bounds import Bounds, tokens_in_shard
from graphattn.config import (
    CPU_MEMORY_BUDGET,
    MAX_TOKENS_DEFAULT,
    Backend,
    BucketSet,
    fit_seq_len,
    pages_in,
    resolve_backend,
    resolve_buckets,
)
from graphattn.dcp import DCP
from graphattn.draft import Drafter, Speculation
from graphattn.errors import UnsupportedModelError, wrong
from graphattn.foreign.contract import ForeignAttention, check_kernel
from graphattn.groups import Group
from graphattn.layer_checks import check_layers
from graphattn.memory import StepMemory
from graphattn.models.contract import SlotTensor, StepModel, slot_tensors
from graphattn.pages import page_bytes
from graphattn.slots import check_slot_tensors, slot_bytes

GPU_MEMORY_SHARE = 0.9  # of the free memory; the rest is for what torch and the driver add


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that is fixed for the life of an engine."""

    bounds: Bounds
    buckets: BucketSet
    backend: Backend
    device: torch.device
    kv_dtype: torch.dtype | None  # of all pages; None: each model's own
    run_ahead: int  # steps that may be launched and unread
    max_queue: int  # requests that may wait for a slot
    dcp: DCP | None  # the KV cache is sharded over its group
    speculate: Speculation | None  # who drafts
    prefix_reuse: bool  # requests share the KV of equal prefixes
    prepack: bool  # host backend: pack the weights of constant linears
    debug: bool = False  # the step checks that attention reads what it derived
    attention: ForeignAttention | None = None  # attends for the model, our kernels for its drafter
    notes: tuple[str, ...] = ()  # what was reduced or chosen on the caller's behalf


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of `graphattn.capture`, unchecked."""

    max_batch: int
    max_seq_len: int | None
    max_tokens: int | None
    page_size: int
    num_pages: int | None
    memory_budget: int | None
    buckets: Sequence[int] | None
    backend: str
    run_ahead: int
    max_queue: int
    dcp: DCP | None
    speculate: Speculation | None
    prefix_reuse: bool
    prepack: bool
    debug: bool = False
    kv_dtype: torch.dtype | None = None
    attention: ForeignAttention | None = None


def resolve(options: Options, model: StepModel) -> EngineConfig:
    """Check every option and fix every bound.

    Raises `ConfigError` or `UnsupportedModelError`; nothing was allocated.
    """
    device, layers = model.device, model.attention_layers
    backend = resolve_backend(options.backend, device)
    check_layers(layers)
    check_slot_tensors(kept := slot_tensors(model))
    if model.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UnsupportedModelError(
            f"model: wanted float32, bfloat16 or float16 weights, got {model.dtype}. "
            "Load it with one of these dtypes."
        )
    max_batch = _count("max_batch", options.max_batch, "the number of requests to run at once")
    page_size = _count("page_size", options.page_size, "a power of two such as 64")
    if page_size & (page_size - 1):
        raise wrong("page_size", "a power of two", page_size, "Use 16, 32, 64 or 128.")
    run_ahead = _count("run_ahead", options.run_ahead, "1 to 4", at_most=4)
    max_queue = _count("max_queue", options.max_queue, "the number of requests that may wait")
    for name in ("prefix_reuse", "prepack", "debug"):
        if not isinstance(getattr(options, name), bool):
            raise wrong(name, "True or False", getattr(options, name), "Pass a bool.")
    speculate = _speculation(options.speculate, model)
    drafts = 0 if speculate is None else speculate.k
    kv_dtype = _kv_dtype(options.kv_dtype, model.dtype)
    per_page = page_bytes(layers, page_size, kv_dtype or model.dtype)
    if speculate is not None:
        per_page += page_bytes(speculate.kv_layers(), page_size, kv_dtype or model.dtype)
    pages = _num_pages(options, per_page, device)
    size, interleave = _parallel(options.dcp)
    longest = tokens_in_shard(pages * page_size, size, interleave)
    max_seq_len, note = fit_seq_len(model.max_seq_len, options.max_seq_len, longest)
    bounds = Bounds(
        max_batch=max_batch,
        max_seq_len=max_seq_len,
        max_tokens=_max_tokens(options, max_batch * (1 + drafts), max_batch * max_seq_len, device),
        page_size=page_size,
        num_pages=pages,
        vocab_size=model.vocab_size,
        max_drafts=drafts,
        dcp_size=size,
        interleave=interleave,
    )
    if options.num_pages is None:  # more pages than all slots can use are waste
        bounds = replace(bounds, num_pages=min(pages, max_batch * bounds.pages_per_seq))
    if options.attention is not None:
        check_kernel(
            options.attention,
            layers,
            graphs=backend != "eager",
            page_size=page_size,
            dtype=kv_dtype or model.dtype,
            decode_query_len=bounds.decode_query_len,
            dcp_size=size,
        )
    return EngineConfig(
        bounds=bounds,
        buckets=resolve_buckets(bounds, options.buckets),
        backend=backend,
        device=device,
        kv_dtype=kv_dtype,
        run_ahead=run_ahead,
        dcp=options.dcp,
        speculate=speculate,
        prefix_reuse=options.prefix_reuse and not kept,
        max_queue=max_queue,
        debug=options.debug,
        prepack=options.prepack and backend == "host" and model.dtype == torch.float32,
        attention=options.attention,
        notes=tuple(filter(None, (note, _slots_note(kept), _kernel_note(options.attention)))),
    )


def _slots_note(kept: Mapping[str, SlotTensor]) -> str | None:
    """The KV of a prefix is of no use to a request without the state that goes with it."""
    if not kept:
        return None
    return f"slot tensors: {slot_bytes(kept)} bytes per slot; requests share no prefixes"


def open_memory(
    model: StepModel, config: EngineConfig, group: Group | None
) -> tuple[StepMemory, Drafter | None]:
    """The memory of an engine and of its drafter."""
    memory = StepMemory(
        model,
        config.bounds,
        kv_dtype=config.kv_dtype,
        device=config.device,
        group=group,
        reduce="ag_rs" if config.dcp is None else config.dcp.reduce,
        kernel=config.attention,
        debug=config.debug,
    )
    speculate = config.speculate
    return memory, None if speculate is None else speculate.open(memory, model)


def widest_window(model: StepModel, speculate: Speculation | None) -> int:
    """Of all layers that keep KV in the pages; 0 when one of them sees everything."""
    layers = [*model.attention_layers, *(speculate.kv_layers() if speculate else ())]
    windows = [layer.window for layer in layers]
    return max(windows) if all(windows) else 0


def prefix_lookahead(config: EngineConfig) -> int | None:
    """Tokens beyond an entry that its KV may depend on; None when prefixes are not shared."""
    if not config.prefix_reuse:
        return None
    return 0 if config.speculate is None else config.speculate.lookahead


def _kernel_note(kernel: ForeignAttention | None) -> str | None:
    if kernel is None:
        return None
    rest = "" if kernel.capabilities.prefill else "; steps with prefill rows by our kernels"
    return f"attention by {type(kernel).__name__}{rest}"


def _parallel(dcp: DCP | None) -> tuple[int, int]:
    """Size and interleave of the group; one rank without one."""
    if dcp is None:
        return 1, 1
    if not isinstance(dcp, DCP):
        raise wrong("dcp", "graphattn.DCP(group, ...)", dcp, "Wrap the process group.")
    return dcp.size, dcp.interleave


def _kv_dtype(kv_dtype: object, own: torch.dtype) -> torch.dtype | None:
    if kv_dtype is None or kv_dtype == own:
        return None
    if kv_dtype != FP8:
        raise wrong(
            "kv_dtype",
            f"torch.float8_e4m3fn, or the model's {own}",
            kv_dtype,
            "Leave it out, or see docs/fp8.md.",
        )
    return FP8


def _speculation(speculate: Speculation | None, model: StepModel) -> Speculation | None:
    if speculate is None or all(hasattr(speculate, n) for n in ("k", "resolve", "open")):
        return None if speculate is None else speculate.resolve(model)
    raise wrong(
        "speculate",
        "graphattn.NGram(k), DraftModel(model, k), MTP(k) or None",
        speculate,
        "See docs/speculation.md.",
    )


def _max_tokens(options: Options, decode_tokens: int, all_tokens: int, device: torch.device) -> int:
    """As asked; by default the device's, and no more than all slots' sequences together."""
    if options.max_tokens is not None:
        return _count("max_tokens", options.max_tokens, "the token places of a mixed step")
    return max(decode_tokens, min(MAX_TOKENS_DEFAULT[device.type], all_tokens))


def _num_pages(options: Options, bytes_per_page: int, device: torch.device) -> int:
    if options.num_pages is not None:
        if options.memory_budget is not None:
            raise wrong(
                "memory_budget",
                "nothing when num_pages is given",
                options.memory_budget,
                "Pass one of the two.",
            )
        return _count("num_pages", options.num_pages, "pages of KV over all requests")
    if options.memory_budget is not None:
        return pages_in(options.memory_budget, bytes_per_page)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return pages_in(int(free * GPU_MEMORY_SHARE), bytes_per_page)
    return pages_in(CPU_MEMORY_BUDGET, bytes_per_page)


def _count(name: str, value: object, what: str, *, at_most: int | None = None) -> int:
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not good or (at_most is not None and value > at_most):  # type: ignore[operator]
        upper = "" if at_most is None else f", at most {at_most}"
        raise wrong(name, f"an integer >= 1{upper}", value, f"Pass {what}.")
    return value  # type: ignore[return-value]
