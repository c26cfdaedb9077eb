"""Any order of calls on an engine, against a model that knows only what each request must say."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from graphattn import EngineClosedError, FinishReason, NGram, Plan, Request
from tests.runtime.lagging_stream import LaggingStream
from tests.runtime.serving import make_engine
from tests.runtime.tiny_model import TinyModel

MODEL = TinyModel(windows=(5, 0), vocab_size=11, max_seq_len=28)


@cache
def expected(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Everything that a request with this prompt can say."""
    return tuple(MODEL.generate(list(prompt), 28))


class EngineMachine(RuleBasedStateMachine):
    """Few pages, few slots, late results: requests are preempted and find each other's prefixes."""

    speculate: NGram | None = None

    def __init__(self) -> None:
        super().__init__()
        self.stream = LaggingStream(pace=0)
        self.engine = make_engine(
            MODEL,
            stream=self.stream,
            backend="eager",
            max_batch=3,
            max_tokens=12,
            num_pages=9,
            run_ahead=2,
            max_queue=5,
            speculate=self.speculate,
        )
        self.limit: dict[Request, int] = {}
        self.polled: dict[Request, list[int]] = {}
        self.ended: set[Request] = set()

    def alive(self) -> list[Request]:
        return [r for r in self.limit if not r.finished]

    @precondition(lambda self: self.engine.stats().waiting < 5 and len(self.alive()) < 7)
    @rule(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12), count=st.integers(1, 14))
    def submit(self, prompt: list[int], count: int) -> None:
        self.poll()
        self.limit[self.engine.submit(prompt, max_new_tokens=count)] = count

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.engine.step()

    @rule(work=st.integers(1, 40))
    def land(self, work: int) -> None:
        """Device work that happens by itself."""
        for _ in range(min(work, self.stream.pending)):
            self.stream.run_one()

    @rule()
    def poll(self) -> None:
        for event in self.engine.poll():
            assert event.request not in self.ended, "news of a request that has ended"
            self.polled.setdefault(event.request, []).extend(event.token_ids)
            if event.finished:
                self.ended.add(event.request)

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.alive()))
        assert self.engine.cancel(request)
        assert not self.engine.cancel(request)
        assert request.finish_reason is FinishReason.CANCELLED

    @precondition(lambda self: self.engine.stats().running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        seated = [work.request for work in self.engine.work() if work.seated]
        if not seated:
            return
        request = data.draw(st.sampled_from(seated))
        before = request.preemptions
        if self.engine.launch(Plan(preempt=(request,))) or request.preemptions > before:
            assert request.preemptions == before + 1

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        stats, pages = self.engine.stats(), self.engine._scheduler.pages
        assert stats.running + stats.waiting == len(self.alive())
        assert stats.running + len(self.engine._scheduler.free_slots) == 3
        assert stats.pages_free + stats.pages_cached + stats.pages_taken == 9
        assert stats.running or not stats.pages_taken
        assert pages.available <= 9
        for request, limit in self.limit.items():
            whole = expected(request.prompt)[:limit]
            assert tuple(request.token_ids) == whole[: len(request.token_ids)]
            if request.finish_reason is FinishReason.LENGTH:
                assert len(request.token_ids) == len(whole)

    def teardown(self) -> None:
        """Everything ends; or the engine is closed in flight, and says so."""
        if len(self.limit) % 3:
            while self.engine.busy:
                if not self.engine.step():
                    self.land(10)
            self.nothing_is_lost_or_doubled()
            assert all(r.finished for r in self.limit)
        self.engine.close()
        self.poll()
        assert self.ended == set(self.limit)
        for request in self.limit:
            assert self.polled.get(request, []) == request.token_ids
            assert request.finish_reason in (FinishReason.LENGTH, FinishReason.CANCELLED)
        stats = self.engine.stats()
        assert stats.requests_finished == stats.requests_submitted == len(self.limit)
        assert stats.tokens_emitted == sum(len(r.token_ids) for r in self.limit)
        assert (stats.running, stats.waiting, stats.pages_taken) == (0, 0, 0)
        with pytest.raises(EngineClosedError):
            self.engine.step()


class DraftingMachine(EngineMachine):
    """Counts that the host learns late."""

    speculate = NGram(2)


TestEngine, TestDrafting = EngineMachine.TestCase, DraftingMachine.TestCase
TestEngine.settings = TestDrafting.settings = settings(
    max_examples=12, stateful_step_count=40, deadline=None
)
