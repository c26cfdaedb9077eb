"""The benchmark measures what it says, and is silent when a check is red."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

import graphattn
from graphattn.demo.runs import run_generate
from profiles import bench, gpu
from profiles.interleave import Pairs, against, two_engines
from profiles.record import append, context, spread
from profiles.workloads import DECODE_1, DECODE_8, Workload
from tests.tiny_llama import tiny_llama

VOCAB = 256
WORK = Workload("tiny", batch=3, prompt_len=5, new_tokens=8)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


def test_pairs_are_decode_steps_of_both_sides(model: LlamaForCausalLM) -> None:
    with graphattn.capture(model, max_batch=3, max_tokens=16, buckets=[3]) as engine:
        pairs = against(engine, model, WORK, partial(run_generate, ignore_eos=True))
    # The first token comes from prefill, and the last forward has no hook behind it.
    assert len(pairs.ours) == len(pairs.theirs) == WORK.new_tokens - 2
    assert pairs.our_tokens == pairs.their_tokens
    assert [len(tokens) for tokens in pairs.our_tokens] == [WORK.new_tokens] * WORK.batch


def test_work_does_not_depend_on_the_bound(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "BOUNDS_8", WORK)
    options = {"max_batch": 3, "max_tokens": 16, "page_size": 4, "buckets": [3]}
    with (
        graphattn.capture(model, max_seq_len=64, **options) as long,
        graphattn.capture(model, max_seq_len=16, **options) as short,
    ):
        pairs = two_engines(long, short, WORK)
        assert pairs.our_tokens == pairs.their_tokens
        items = bench.work_items(long)
        assert items == bench.work_items(short) == {"decode_count": [3], "prefill_count": [0]}


def test_a_wrong_token_or_too_few_pairs_are_refused() -> None:
    good = Pairs((1.0,) * 30, (2.0,) * 30, ((1, 2),), ((1, 2),))
    bench.check(good, "good")
    assert good.ratio == 2.0
    with pytest.raises(bench.Refused, match="tokens differ"):
        bench.check(replace(good, their_tokens=((1, 3),)), "wrong")
    with pytest.raises(bench.Refused, match="only 29 pairs"):
        bench.check(replace(good, ours=(1.0,) * 29), "few")


def test_workloads_give_enough_pairs_and_the_same_prompts_each_time() -> None:
    for work in (DECODE_1, DECODE_8):
        assert work.new_tokens - 2 >= 30
        prompts = work.prompts(VOCAB)
        assert prompts == work.prompts(VOCAB)
        assert [len(p) for p in prompts] == [work.prompt_len - i for i in range(work.batch)]


def test_records_say_where_they_come_from(tmp_path: Path) -> None:
    file = tmp_path / "results" / "cpu.jsonl"
    append(file, context(), [{"ratio": 1.5}])
    append(file, context(), [{"ratio": 1.6}])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["ratio"] for line in lines] == [1.5, 1.6]
    assert all({"time", "commit", "machine", "versions"} <= set(line) for line in lines)


def test_spread_has_the_median_between_its_quartiles() -> None:
    assert spread([4.0, 1.0, 2.0, 3.0, 5.0]) == {"median": 3.0, "q1": 1.5, "q3": 4.5, "n": 5}


@pytest.mark.parametrize("part", ["launch", "attention"])
def test_gpu_parts_run_dry(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "records.jsonl"
    monkeypatch.setattr("sys.argv", ["gpu", part, "--dry", "--out", str(out)])
    assert gpu.main() == 0
    assert all(json.loads(line)["part"] == part for line in out.read_text().splitlines())
