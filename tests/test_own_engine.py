"""The engines of others in `examples/`: their tokens are `generate`'s while jobs come and go."""

from __future__ import annotations

import importlib
import random
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import graphattn
from tests.tiny_llama import tiny_llama

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def own_engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)  # as for a script beside them
    return importlib.import_module("own_engine")


@pytest.fixture
def attention_only(own_engine: ModuleType) -> ModuleType:
    return importlib.import_module("attention_only")


def llama(own_engine: ModuleType) -> torch.nn.Module:
    """The example's model with the weights of the transformers one."""
    state = {name.removeprefix("model."): x for name, x in tiny_llama().state_dict().items()}
    model = own_engine.Llama()
    model.load_state_dict(state)
    return model.eval()


@cache
def prompts_and_answers() -> list[tuple[list[int], list[int]]]:
    """Prompts of 1 to 60 tokens, and greedy answers of up to 30."""
    rng, model = random.Random(5), tiny_llama()
    pairs = []
    for length, new in ((1, 30), (60, 9), (7, 25), (2, 4), (33, 12), (8, 8), (16, 30), (47, 2)):
        prompt = [rng.randrange(256) for _ in range(length)]
        ids = torch.tensor([prompt])
        answer = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False
        )
        pairs.append((prompt, answer[0, length:].tolist()))
    return pairs


@pytest.mark.parametrize(("name", "lines"), [("own_engine", 200), ("attention_only", 40)])
def test_examples_are_short(name: str, lines: int) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= lines


@pytest.mark.parametrize("pages", [40, 17])
def test_engine_gives_the_tokens_of_generate(
    own_engine: ModuleType, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs come while others run, finish, and with few pages are thrown out and start again;
    every bucket is used."""
    monkeypatch.setattr(own_engine, "PAGES", pages)
    engine = own_engine.Engine(llama(own_engine), "cpu")
    for pool in engine.buffers.pools().values():
        pool.fill_(float("nan"))
    replayed, thrown_out = set(), []
    for name, graph in engine.graphs.items():
        monkeypatch.setattr(graph, "replay", lambda n=name, r=graph.replay: (replayed.add(n), r()))
    leave = engine.leave
    monkeypatch.setattr(engine, "leave", lambda job: (thrown_out.append(job), leave(job))[1])
    jobs = []
    pairs = prompts_and_answers() * 2
    while len(jobs) < len(pairs) or engine.running or engine.waiting:
        if len(jobs) < len(pairs) and len(engine.running) < 6:
            prompt, answer = pairs[len(jobs)]
            jobs.append(own_engine.Job([*prompt], len(prompt) + len(answer)))
            engine.submit(jobs[-1])
        engine.step()
    assert [job.tokens for job in jobs] == [prompt + answer for prompt, answer in pairs]
    assert replayed == set(engine.graphs)
    assert sorted(engine.pages) == list(range(pages))
    assert (len(thrown_out) > len(jobs)) == (pages < 40)


def test_engine_samples_at_random_beside_greedy_jobs(own_engine: ModuleType) -> None:
    torch.manual_seed(1)
    (prompt, answer), engine = prompts_and_answers()[2], own_engine.Engine(llama(own_engine), "cpu")
    jobs = [own_engine.Job([*prompt], 32, temperature=t) for t in (0.0, 1.0, 1.0, 0.0)]
    for job in jobs:
        engine.submit(job)
    while engine.running or engine.waiting:
        engine.step()
    assert jobs[0].tokens == jobs[3].tokens == prompt + answer
    assert len({tuple(job.tokens) for job in jobs}) == 3
    with pytest.raises(AssertionError, match="200 tokens"):
        engine.submit(own_engine.Job([1, 2], 200))


def test_engine_steps_are_audited_and_verified(own_engine: ModuleType) -> None:
    """Every bucket: replays equal eager runs with everything spoiled that a step must write."""
    engine = own_engine.Engine(llama(own_engine), "cpu")
    prompts = [prompt for prompt, _ in prompts_and_answers()]
    for pages, row in enumerate(engine.buffers.page_table):
        row[:4] = torch.arange(4 * pages, 4 * pages + 4)
    for tokens, mixed in own_engine.BUCKETS[1::2]:
        assert graphattn.audit(engine.program(tokens, mixed)).ok
        rows = min(8, tokens)

        def inputs(step: int, tokens: int = tokens, mixed: bool = mixed, rows: int = rows) -> None:
            places = tokens // rows if mixed else 1
            jobs = [own_engine.Job(prompts[1][8 * step :], 99, 0.5, slot=r) for r in range(rows)]
            engine.write([(job, places) for job in jobs[: rows - step]])

        report = graphattn.verify(
            engine.graphs[f"{tokens}-{mixed}"],
            inputs=inputs,
            watch=engine.buffers.pools(),
            steps=min(3, rows),
            poison=engine.buffers.spoil,
        )
        assert report.ok, report


def test_attention_only_gives_the_tokens_of_generate(attention_only: ModuleType) -> None:
    """Rows are used again as soon as their sequence has ended, and stand idle now and then."""
    rng, pairs = random.Random(2), prompts_and_answers()
    decoder = attention_only.Decoder(llama(importlib.import_module("own_engine")), rows=3)
    for pool in decoder.buffers.pools().values():
        pool.fill_(float("nan"))
    waiting, running, answers = list(range(len(pairs))), [-1] * 3, [list[int]() for _ in pairs]
    while waiting or max(running) >= 0:
        fresh: list[list[int]] = [[] for _ in running]
        for row, which in enumerate(running):
            if which < 0 and waiting:
                running[row] = which = waiting.pop()
                decoder.cached[row] = 0
            if which >= 0 and rng.random() < 0.8:
                fresh[row] = answers[which][-1:] or pairs[which][0]
        if not any(fresh):
            continue
        for row, token in enumerate(decoder.next_tokens(fresh)):
            if token is not None:
                answers[running[row]].append(token)
                if len(answers[running[row]]) == len(pairs[running[row]][1]):
                    running[row] = -1
    assert answers == [answer for _, answer in pairs]


def test_attention_only_is_audited_and_verified(attention_only: ModuleType) -> None:
    decoder = attention_only.Decoder(llama(importlib.import_module("own_engine")), rows=3)
    for step in (decoder.buffers, decoder.buffers.narrow(3, mixed=False)):
        ids = torch.randint(256, step.positions.shape)
        lengths = torch.zeros(2, 3, dtype=torch.int32)

        def run(
            step: graphattn.StepBuffers = step, ids: Tensor = ids, n: Tensor = lengths
        ) -> Tensor:
            return decoder.run(step, ids, n)

        def inputs(number: int, lengths: Tensor = lengths) -> None:
            lengths[0] = torch.tensor([1, number % 2, 1])
            lengths[1] = torch.tensor([number, 5, 30])

        assert graphattn.audit(run).ok
        with graphattn.Graph(run, device="cpu") as graph:
            report = graphattn.verify(graph, inputs=inputs, watch=step.pools(), poison=step.spoil)
        assert report.ok, report


@pytest.mark.parametrize("name", ["own_engine", "attention_only"])
def test_examples_run(name: str, request: pytest.FixtureRequest) -> None:
    import runpy

    request.getfixturevalue(name)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
