"""Bytes and operations that a step needs, stage by stage, from the model's sizes and the lengths.

Each is the least that any implementation moves and computes: every weight and every visible KV
entry once, every input and output of a stage once; no padding, no partial results, no activations
between linears that a fused kernel could keep. A multiplication and an addition are two operations.

    stage        bytes                                          operations
    linears      weights + inputs + outputs, of each matrix     2 in out per token
    attention    visible entries of each row + q + out          2 Hq (D + Dv) per token and entry
    kv_write     new entries, read and written                  0
    sampling     logits                                         1 per logit
    collectives  what all ranks send                            0

The embedding's rows, norms and rotations are left out: below a percent of any model here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from graphattn.bounds import ceil_div
from graphattn.models import adapt
from graphattn.models.contract import AttentionLayer
from profiles.peaks import Peaks


@dataclass(frozen=True, slots=True)
class Work:
    """What one stage moves and computes."""

    bytes: float
    operations: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.operations + other.operations)


Stages = dict[str, Work]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer, or `experts` alike of which each token uses `used`."""

    outputs: int
    inputs: int
    experts: int = 1
    used: int = 1
    at_logits: bool = False  # only for places that need logits

    def work(self, tokens: int, itemsize: int) -> Work:
        """For `tokens` rows. Experts: as if all rows chose different ones, while there are any."""
        size, rows = self.outputs * self.inputs, tokens * self.used
        read = min(self.experts, rows) * size + rows * (self.inputs + self.outputs)
        return Work(itemsize * read, 2 * rows * size)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model, as far as its steps cost."""

    matrices: tuple[Matrix, ...]
    layers: tuple[AttentionLayer, ...]
    vocab_size: int
    itemsize: int  # of weights and activations


def sizes(model: Any) -> Sizes:
    """Of a transformers causal LM, or of a torch module that meets the step contract."""
    step_model = adapt(model, fuse=False)
    find_head = getattr(model, "get_output_embeddings", lambda: getattr(model, "head", None))
    config = getattr(model, "config", None)
    used = getattr(config, "num_experts_per_tok", None) or 1
    return Sizes(
        tuple(_matrices(model, find_head(), used)),
        step_model.attention_layers,
        step_model.vocab_size,
        step_model.dtype.itemsize,
    )


def _matrices(model: nn.Module, head: nn.Module | None, used: int) -> Iterator[Matrix]:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            yield Matrix(module.out_features, module.in_features, at_logits=module is head)
        elif not isinstance(module, nn.Embedding):
            for weight in module.parameters(recurse=False):
                if weight.dim() == 2:  # a router's
                    yield Matrix(weight.shape[0], weight.shape[1])
                elif weight.dim() == 3:  # all experts of a layer, as transformers stacks them
                    experts, outputs, inputs = weight.shape
                    yield Matrix(outputs, inputs, experts, used)


def step_work(
    model: Sizes,
    lengths: Sequence[int],
    *,
    query_len: int = 1,
    kv_itemsize: int | None = None,
    ranks: int = 1,
    reduce: Literal["ag_rs", "a2a"] = "ag_rs",
) -> Stages:
    """A decode step of rows that end it with `lengths` tokens, `query_len` of them new.

    With `ranks`, all of them together, as they run in one process: the linears once, the KV in
    shards, and what they send.
    """
    tokens, size = len(lengths) * query_len, model.itemsize
    linears = (matrix.work(tokens, size) for matrix in model.matrices)
    held = kv_itemsize or size
    attention = (attention_work(x, lengths, size, held, query_len) for x in model.layers)
    entries = sum(layer.entry_values for layer in model.layers)
    sent = sum(collective_bytes(x, reduce, ranks, tokens, size) for x in model.layers)
    sampled = 4 * tokens * (ranks - 1) / ranks
    return {
        "linears": total(linears),
        "attention": total(attention),
        "kv_write": Work(tokens * entries * (size + held)),
        "sampling": Work(tokens * model.vocab_size * size, tokens * model.vocab_size),
        "collectives": Work(ranks * (sent + sampled)),
    }


def attention_work(
    layer: AttentionLayer,
    lengths: Sequence[int],
    itemsize: int,
    kv_itemsize: int,
    query_len: int = 1,
) -> Work:
    """Of one layer: each entry that any new token of a row sees is read once."""
    values = layer.head_dim + layer.out_dim
    entries = places = 0
    for length in lengths:
        first = length - query_len  # position of the row's first new token
        begin = max(0, first + 1 - layer.window) if layer.window else 0
        entries += length - begin
        seen = range(first + 1, length + 1)
        places += sum(min(n, layer.window) if layer.window else n for n in seen)
    rows = len(lengths) * query_len * layer.num_q_heads
    moved = entries * layer.entry_values * kv_itemsize + rows * values * itemsize
    return Work(moved, 2 * places * layer.num_q_heads * values)


def collective_bytes(
    layer: AttentionLayer,
    reduce: Literal["ag_rs", "a2a"],
    ranks: int,
    tokens: int,
    itemsize: int,
) -> float:
    """What each of W ranks sends for a layer, heads replicated, by ring algorithms: docs/dcp.md."""
    W, rows, dim = ranks, tokens * layer.num_q_heads, layer.out_dim
    if reduce == "ag_rs":
        return 4 * rows * (W - 1) + 2 * itemsize * rows * dim * (W - 1) / W
    rows = W * ceil_div(rows, W)  # rows are padded to equal messages
    message = (itemsize * dim + 4) * rows
    return (message + itemsize * dim * rows) * (W - 1) / W


def total(works: Iterable[Work]) -> Work:
    """Sum."""
    return sum(works, Work(0.0))


def achieved(stages: Stages, seconds: float, peaks: Peaks) -> dict[str, Any]:
    """Shares of the peaks that a step of `seconds` reaches: a record's field `roofline`.

    `of_copy` and `of_matmul` are the step's bytes and operations per second over the peaks;
    `of_bound` is the least time, each stage at the peak that limits it, over the step's.
    """
    whole = total(stages.values())
    return {
        "stages": {name: [work.bytes, work.operations] for name, work in stages.items()},
        "of_copy": whole.bytes / seconds / peaks.copy_bytes_per_s,
        "of_matmul": whole.operations / seconds / peaks.matmul_ops_per_s,
        "of_bound": least_seconds(stages, peaks) / seconds,
    }


def least_seconds(stages: Stages, peaks: Peaks) -> float:
    """One stage after another, each at the peak that limits it."""
    return sum(
        max(work.bytes / peaks.copy_bytes_per_s, work.operations / peaks.matmul_ops_per_s)
        for work in stages.values()
    )
