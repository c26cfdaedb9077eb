"""Bytes and operations of the formulas, counted another way."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from graphattn import AttentionLayer
from graphattn.planner.capacity import Load
from graphattn.planner.model import read_model
from graphattn.planner.shard import Shard
from graphattn.planner.work import Step
from graphattn.planner.work import step_work as planned_work
from profiles import roofline
from profiles.peaks import Peaks, measure_peaks
from profiles.roofline import Matrix, Work, achieved, attention_work, sizes, step_work
from tests.tiny_llama import tiny_llama


def decode(model: Any, batch: int, length: int, look: Any) -> Any:
    """One decode step that ends with `length` tokens in each row, under `look`."""
    model.set_attn_implementation("eager")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.ones(batch, length - 1, dtype=torch.long), cache=cache, use_cache=True)
        with look:
            model(torch.ones(batch, 1, dtype=torch.long), cache=cache, use_cache=True)
    return look


@pytest.mark.parametrize(("batch", "length"), [(1, 2), (3, 17)])
def test_operations_are_those_that_torch_counts(batch: int, length: int) -> None:
    model = tiny_llama()
    counted = decode(model, batch, length, FlopCounterMode(display=False)).get_total_flops()
    stages = step_work(sizes(model), [length] * batch)
    assert stages["linears"].operations + stages["attention"].operations == counted


def test_bytes_of_linears_are_weights_inputs_and_outputs() -> None:
    model, moved = tiny_llama(), 0
    work = step_work(sizes(model), [1, 1, 1])["linears"]

    def hook(module: nn.Linear, args: tuple[torch.Tensor], out: torch.Tensor) -> None:
        nonlocal moved
        moved += sum(t.numel() * t.itemsize for t in (module.weight, args[0], out))

    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    with torch.no_grad():
        for linear in linears:
            linear.register_forward_hook(hook)
        model(torch.ones(3, 1, dtype=torch.long))
    assert work.bytes == moved


@pytest.mark.parametrize("window", [0, 1, 5, 100])
@pytest.mark.parametrize("query_len", [1, 4])
def test_attention_reads_what_its_tokens_see(window: int, query_len: int) -> None:
    layer = AttentionLayer(6, 2, 16, scale=1.0, window=window)
    lengths = [4, 5, 6, 40]
    entries, places = 0, 0
    for length in lengths:
        seen = [
            {c for c in range(p + 1) if not window or c > p - window}
            for p in range(length - query_len, length)
        ]
        entries += len(set().union(*seen))
        places += sum(map(len, seen))
    work = attention_work(layer, lengths, itemsize=2, kv_itemsize=1, query_len=query_len)
    tokens = query_len * len(lengths)
    assert work.bytes == entries * 2 * 2 * 16 + tokens * 6 * (16 + 16) * 2
    assert work.operations == places * 6 * 2 * (16 + 16)


def test_a_latent_is_read_once_for_key_and_value() -> None:
    layer = AttentionLayer(128, 1, 576, scale=1.0, value_dim=512)
    work = attention_work(layer, [1000], itemsize=2, kv_itemsize=2)
    assert work == Work(1000 * 1152 + 128 * (576 + 512) * 2, 1000 * 128 * 2 * (576 + 512))


def test_experts_are_read_as_far_as_they_are_used() -> None:
    expert = Matrix(outputs=3, inputs=5, experts=8, used=2)
    assert expert.work(3, itemsize=2) == Work(2 * (6 * 15 + 6 * 8), 2 * 6 * 15)
    assert expert.work(9, itemsize=2).bytes == 2 * (8 * 15 + 18 * 8)


def test_the_miniature_has_all_its_weights() -> None:
    """Latent attention, a router and stacked experts: every matrix but the embedding."""
    from profiles.miniature.model import load

    model = load()
    found = sum(m.experts * m.outputs * m.inputs for m in sizes(model).matrices)
    wanted = [p for n, p in model.named_parameters() if p.dim() >= 2 and "embed_tokens" not in n]
    assert found == sum(p.numel() for p in wanted)
    assert [m.at_logits for m in sizes(model).matrices].count(True) == 1


def test_writes_logits_and_messages() -> None:
    layer = AttentionLayer(4, 2, 8, scale=1.0)
    model = roofline.Sizes((), (layer, layer), vocab_size=100, itemsize=2)
    stages = step_work(model, [9, 9, 9], query_len=2, kv_itemsize=1, ranks=2)
    assert stages["kv_write"] == Work(6 * 2 * 32 * (2 + 1))
    assert stages["sampling"] == Work(6 * 100 * 2, 600)
    sent = roofline.collective_bytes(layer, "ag_rs", 2, 6, 2)
    assert sent == 4 * 24 + 2 * 2 * 24 * 8 / 2
    assert stages["collectives"].bytes == 2 * (2 * sent + 4 * 6 / 2)
    assert step_work(model, [9])["collectives"] == Work(0.0)


def test_shares_of_the_peaks() -> None:
    peaks = Peaks(copy_bytes_per_s=100.0, matmul_ops_per_s=1000.0, dtype="float32")
    stages = {"linears": Work(50.0, 100.0), "attention": Work(10.0, 400.0)}
    shares = achieved(stages, 2.0, peaks)
    assert shares["of_copy"] == 60 / 200
    assert shares["of_matmul"] == 500 / 2000
    assert shares["of_bound"] == (0.5 + 0.4) / 2
    assert shares["stages"] == {"linears": [50.0, 100.0], "attention": [10.0, 400.0]}


def test_peaks_are_measured() -> None:
    peaks = measure_peaks(torch.device("cpu"), torch.float32, shrink=64)
    assert peaks.dtype == "float32"
    assert 1e7 < peaks.copy_bytes_per_s < 1e13
    assert 1e7 < peaks.matmul_ops_per_s < 1e16


def test_the_planner_counts_the_same_from_the_configuration_alone(tmp_path: Path) -> None:
    """Two counts of one step: from the modules here, from config.json there."""
    model, lengths = tiny_llama(), [40] * 3
    model.config.save_pretrained(tmp_path)
    ours = step_work(sizes(model), lengths)
    load = Load(context=lengths[0], output=0, max_batch=3, kv_bytes=4)
    step = Step(rows=3, places=3, prompt=0)
    theirs = planned_work(read_model(str(tmp_path)), Shard(tp=1, dcp=1), 0, load, step)
    linear = theirs.linear_operations + theirs.other_operations
    assert (theirs.sent_bytes, theirs.messages) == (0, 0)
    assert theirs.decode_operations == ours["attention"].operations
    layer = sizes(model).layers[0]
    read = len(sizes(model).layers) * sum(lengths) * layer.entry_values * 4
    assert theirs.kv_bytes == read < ours["attention"].bytes  # which has q and out as well
    norms = 2 * 3 * sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert linear - ours["linears"].operations in range(norms + 1)  # which it counts as products
