"""The benchmarks measure what they say, and are silent when a check is red."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaForCausalLM

import graphattn
from graphattn.demo.runs import Run, run_generate
from profiles import run
from profiles.benchmarks import BENCHMARKS, README, batches, bounds
from profiles.interleave import Pairs, Turns, against, finish, in_turn, submit
from profiles.record import RESULTS, Record, append, check, context, spread
from profiles.setting import Refused, Setting
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


def test_turns_pair_our_steps_with_the_gaps_that_follow(model: LlamaForCausalLM) -> None:
    with graphattn.capture(model, max_batch=3, max_tokens=16, buckets=[3]) as engine:
        requests, turns = submit(engine, WORK), Turns(engine)
        for decodes in (True, True, False, True):
            turns.take(decodes=decodes)
        assert (len(turns.ours), len(turns.theirs)) == (3, 2)
        pairs = turns.pairs(finish(engine, requests), ())
    assert len(pairs.ours) == len(pairs.theirs) == 2


def test_work_does_not_depend_on_the_bound(model: LlamaForCausalLM) -> None:
    options: dict[str, Any] = {"max_batch": 3, "max_tokens": 16, "page_size": 4, "buckets": [3]}
    with (
        graphattn.capture(model, max_seq_len=64, **options) as long,
        graphattn.capture(model, max_seq_len=16, **options) as short,
    ):
        first, second = in_turn([long, short], WORK)
        assert first.tokens == second.tokens
        assert len(first.seconds) == len(second.seconds) == WORK.new_tokens - 1
        items = bounds.work_items(long, WORK)
        assert items == bounds.work_items(short, WORK)
        assert items == {"decode_count": [3], "prefill_count": [0]}


def test_a_wrong_token_or_too_few_pairs_are_refused() -> None:
    good, setting = Pairs((1.0,) * 30, (2.0,) * 30, ((1, 2),), ((1, 2),)), Setting()
    setting.check(good, "good")
    assert good.ratio == 2.0
    with pytest.raises(Refused, match="tokens differ"):
        setting.check(replace(good, their_tokens=((1, 3),)), "wrong")
    with pytest.raises(Refused, match="only 29 pairs"):
        setting.check(replace(good, ours=(1.0,) * 29), "few")


def test_workloads_give_enough_pairs_and_the_same_prompts_each_time() -> None:
    for work in (DECODE_1, DECODE_8):
        assert work.new_tokens - 2 >= 30
        prompts = work.prompts(VOCAB)
        assert prompts == work.prompts(VOCAB)
        assert [len(p) for p in prompts] == [work.prompt_len - i for i in range(work.batch)]
        assert [a - len(p) for a, p in zip(work.lengths, prompts, strict=True)] == [21] * work.batch


# Those that take seconds on a tiny model; `generate_batch` sets itself up for longer.
DRY = ["bounds", "batches", "compiled", "peers", "mtp", "ranges"]
SLOW = [n for n in BENCHMARKS if n not in DRY]


@pytest.mark.parametrize("name", [*DRY, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
@pytest.mark.filterwarnings("ignore")  # of transformers' own loops
def test_benchmarks_run_dry(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--dry", "--out", str(tmp_path), name]) == 0
    lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
    printed = capsys.readouterr().out
    assert f"\n{name}, " in printed
    assert printed.count("\n  ") == len(lines) >= 1
    for record in map(json.loads, lines):
        assert record["benchmark"] == name
        assert {"copy_bytes_per_s", "matmul_ops_per_s", "dtype"} == set(record["peaks"])
        check(record)


def test_a_red_check_prints_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One token of 24 is wrong; the benchmark beside it is kept."""

    def wrong(*args: Any, **options: Any) -> Run:
        right = run_generate(*args, **options)
        first, *others = right.token_ids
        return replace(right, token_ids=((*first[:-1], first[-1] ^ 1), *others))

    monkeypatch.setattr(batches, "run_generate", wrong)
    green = SimpleNamespace(measure=lambda setting: [{"ratio": 1.5}])
    monkeypatch.setitem(BENCHMARKS, "green", green)  # type: ignore[arg-type]
    assert run.main(["--dry", "--out", str(tmp_path), "batches", "green"]) == 1
    printed = capsys.readouterr()
    assert [path.name for path in tmp_path.iterdir()] == ["green.jsonl"]
    assert "batches: refused: batch 1: tokens differ" in printed.err
    assert "ratio 1.5" in printed.out
    assert "ours" not in printed.out


def test_a_dry_run_leaves_the_results_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Path | None] = []
    monkeypatch.setattr(run, "run", lambda setting, names, out: kept.append(out) or [])
    for arguments in (["--dry"], [], ["--no-record"], ["--dry", "--out", "here"]):
        assert run.main(arguments) == 0
    assert kept == [None, RESULTS, None, Path("here")]


def test_names_are_listed_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()[:-1]
    assert [line[2:].split()[0] for line in lines] == list(BENCHMARKS)
    assert [line[2:].split()[0] for line in lines if line[0] == "*"] == list(README)
    with pytest.raises(SystemExit):
        run.main(["no-such"])
    assert "no benchmark no-such; there are decode, bounds" in capsys.readouterr().err


def test_records_say_where_they_come_from(tmp_path: Path) -> None:
    file = tmp_path / "results" / "cpu.jsonl"
    append(file, context(), [{"ratio": 1.5}])
    append(file, context(), [{"ratio": 1.6}])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["ratio"] for line in lines] == [1.5, 1.6]
    assert all({"time", "commit", "machine", "versions"} <= set(line) for line in lines)


SHARES = {"stages": {}, "of_copy": 0.1, "of_matmul": 0.1, "of_bound": 0.1}
TIMES = spread([1.0, 2.0])


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"step": TIMES}, "end with _s"),
        ({"ours_s": TIMES}, "go together"),
        ({"roofline": SHARES}, "go together"),
        ({"ours_s": TIMES, "roofline": {"of_copy": 0.1}}, "roofline has"),
        ({"theirs_s": TIMES}, "has a ratio"),
    ],
)
def test_a_record_without_what_its_fields_need_is_an_error(record: Record, problem: str) -> None:
    check({"ours_s": TIMES, "theirs_s": TIMES, "ratio": 1.0, "roofline": SHARES})
    with pytest.raises(ValueError, match=problem):
        check(record)


def test_spread_has_the_median_between_its_quartiles() -> None:
    assert spread([4.0, 1.0, 2.0, 3.0, 5.0]) == {"median": 3.0, "q1": 1.5, "q3": 4.5, "n": 5}
