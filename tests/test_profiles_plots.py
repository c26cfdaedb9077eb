"""Figures and the README's table are made of the records in profiles/results, of their last run."""

import json
from pathlib import Path
from typing import Any

import pytest

from profiles import plots
from profiles.benchmarks import BENCHMARKS
from profiles.plots import FIGURES, draw
from profiles.record import RESULTS, Record, append, check, latest, spread
from profiles.table import table

ROOT = Path(__file__).parents[1]


def step(milliseconds: float, **case: Any) -> Record:
    times = spread([1e-3 * milliseconds * f for f in (0.9, 1.0, 1.1)])
    shares = {"stages": {}, "of_copy": 0.4, "of_matmul": 0.1, "of_bound": 0.5}
    return case | {"ours_s": times, "roofline": shares}


def beside(milliseconds: float, against: str, **case: Any) -> Record:
    return step(milliseconds, **case) | {
        "against": against,
        "theirs_s": spread([2e-3 * milliseconds] * 2),
        "ratio": 2.0,
    }


def drafting(k: int, **case: Any) -> Record:
    rates = {"tokens_per_s": 30.0, "plain_tokens_per_s": 10.0, "ratio": 3.0, "step_cost": 1.5}
    return step(9.0, k=k, **rates, **case)


CALLS = {"call_s": spread([0.5, 0.5]), "theirs_call_s": spread([1.0, 1.0]), "ratio": 2.0}
MADE: dict[str, list[Record]] = {
    "decode": [beside(12.34, "generate", batch=8), {"batch": 8, "outside_linears": 0.5}],
    "batches": [beside(10 + b, "generate", batch=b) for b in (1, 2, 8)],
    "lengths": [beside(10 + n / 64, "generate", batch=2, length=n) for n in (64, 256)],
    "bounds": [
        beside(10.0, "max_seq_len 512", batch=8, max_seq_len=n, work_items={}) for n in (512, 8192)
    ],
    "peers": [
        *(
            step(n / 100, peer=p, batch=8, length=n, max_seq_len=bound)
            for p in ("graphattn", "sdpa")
            for n, bound in ((64, 64), (512, 512), (64, 512))
        ),
        {
            "peer": "flashinfer",
            "batch": 8,
            "length": 64,
            "max_seq_len": 64,
            "reason": "needs a GPU",
        },
    ],
    "dcp": [
        {"part": "messages", "reduce": "a2a", "W": 2},
        *(beside(9.0, "W=1", part="step", reduce=r, W=w) for r in ("ag_rs", "a2a") for w in (1, 2)),
    ],
    "speculation": [
        drafting(5, text="repeats", drafter="NGram"),
        drafting(5, text="copies", drafter="NGram"),
        *(drafting(k, text="held-out", drafter="MTP") for k in (1, 2)),
        *(drafting(k, text="held-out, sampled", drafter="MTP") for k in (1, 2)),
    ],
    "mtp": [
        step(9.0, batch=1, k=1, new_tokens=64, against="generate(use_mtp=True)") | CALLS,
    ],
    "serving": [
        {"part": "host", "rows": 64, "device": "instant", "host_s": spread([5e-4, 5e-4])},
        {"part": "prefixes", "prompts": 8, "shared": 192, "prompt_tokens": 200} | CALLS,
        *({"part": "long_prompt", "prompt_tokens": 384, "longest_pause_s": s} for s in (2.0, 0.25)),
        step(9.0, part="throughput", requests=16, against="generate_batch")
        | {"tokens_per_s": 32.1, "theirs_tokens_per_s": 16.0, "ratio": 2.0},
    ],
}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Records of two runs of every benchmark; those of the first are not to be seen again."""
    for name, records in MADE.items():
        spoiled = [{"benchmark": name, "text": "old"}]
        append(tmp_path / f"{name}.jsonl", {"time": "1"}, spoiled)
        append(tmp_path / f"{name}.jsonl", {"time": "2", "benchmark": name}, records)
        for record in records:
            check(record)
    return tmp_path


def written(paths: list[Path]) -> set[str]:
    """Names of files that hold what their suffix says, and are small."""
    for path in paths:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")
        assert 2000 < len(data) < 100_000
    return {path.name for path in paths}


EVERY = {f"{name}.{suffix}" for name in FIGURES for suffix in ("svg", "png")}


def test_every_figure_is_drawn(results: Path, tmp_path: Path) -> None:
    assert plots.main(["--results", str(results)]) == 0
    first = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert {path.name for path in first} >= EVERY
    assert written(draw(results, tmp_path)) == EVERY
    assert all(path.read_bytes() == data for path, data in first.items())  # nothing of the moment


def test_a_figure_says_what_its_records_say(results: Path) -> None:
    draw(results, results)
    text = (results / "step-batch.svg").read_text()
    for word in ("graphattn", "transformers generate", "roofline of this machine", "milliseconds"):
        assert word in text
    peers = (results / "attention-peers.svg").read_text()
    assert "sdpa" in peers
    assert "flashinfer" not in peers  # it was not timed


def test_without_records_there_is_no_figure(tmp_path: Path) -> None:
    assert draw(tmp_path, tmp_path) == []


def test_the_table_is_that_of_the_last_run(results: Path) -> None:
    lines = table(results).splitlines()
    assert lines[2:] == [
        "| decode step, batch 8 | 12.3 ms | `generate` 24.7 ms | 2.00 | 50% |",
        "| decode step, batch 8, `max_seq_len` 8,192 | 10 ms | 512, same lengths: 20 ms "
        "| 2.00 | 50% |",
        "| 16 requests of mixed lengths, 8 slots | 32.1 tokens/s | `generate_batch` 16 tokens/s "
        "| 2.00 | 50% |",
        "| 8 prompts, 192 of 200 tokens equal | 0.50 s | without prefix reuse 1.00 s | 2.00 |  |",
        "| pause of decoding rows for a prompt of 384, in chunks | 0.25 s | whole 2.00 s "
        "| 8.00 |  |",
        "| host's own time of a step, 64 rows | 0.5 ms |  |  |  |",
        "| `NGram(5)`, SmolLM2 repeats itself | 30 tokens/s | without drafts 10 tokens/s "
        "| 3.00 | 50% |",
        "| `NGram(5)`, SmolLM2 copies a text | 30 tokens/s | without drafts 10 tokens/s "
        "| 3.00 | 50% |",
        "| `MTP(1)`, miniature, batch 8 | 30 tokens/s | without drafts 10 tokens/s | 3.00 | 50% |",
        "| `MTP(1)`, miniature, batch 1 | 128 tokens/s | `generate(use_mtp=True)` 64 tokens/s "
        "| 2.00 | 50% |",
    ]


COMMITTED = sorted(path for path in RESULTS.glob("*.jsonl") if path.stem in BENCHMARKS)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_records_keep_the_schema(path: Path) -> None:
    for record in map(json.loads, path.read_text().splitlines()):
        assert {"time", "commit", "machine", "versions", "benchmark"} <= set(record)
        assert ("peaks" in record) or "roofline" not in record
        assert record["benchmark"] == path.stem
        check(record)


def test_committed_figures_are_those_of_the_committed_records(tmp_path: Path) -> None:
    """Another matplotlib draws other bytes, so the text in them is compared."""
    assert written(draw(RESULTS, tmp_path)) == EVERY
    for name in FIGURES:
        fresh, kept = ((folder / f"{name}.svg").read_text() for folder in (tmp_path, RESULTS))
        assert _words(fresh) == _words(kept)
        assert written([RESULTS / f"{name}.png"])


def _words(svg: str) -> list[str]:
    return [part.split("<")[0] for part in svg.split('">')[1:] if "</text>" in part]


def test_the_readme_has_the_table_of_the_committed_records() -> None:
    assert table(RESULTS) in (ROOT / "README.md").read_text()
    assert all(latest(RESULTS, name) for name, _ in FIGURES.values())
