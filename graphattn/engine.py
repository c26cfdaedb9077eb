"""Engine: composes the parts, holds no arithmetic.

    OPEN --close(), or a failed step--> CLOSED

`step` launches one replay and never waits for the device; `poll` hands out what has landed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Self, Unpack

from torch import Tensor

from graphattn._capture import nvtx_ranges
from graphattn._capture.family import capture_family
from graphattn._capture.graph import Graph
from graphattn.checkup import Checkup
from graphattn.config import Bucket
from graphattn.errors import EngineClosedError, StepError, wrong
from graphattn.inputs import InputRing, PromptRing, StepInputs
from graphattn.lockstep import Message, open_lockstep
from graphattn.models import weights
from graphattn.models.contract import StepModel
from graphattn.report import EngineReport, Progress, Stats, bucket_report, engine_report
from graphattn.request import (
    Completion,
    Event,
    FinishReason,
    Request,
    SamplingFields,
    SamplingParams,
    completion,
    merge_params,
    new_request,
)
from graphattn.ring import OutputRing
from graphattn.scheduler import Scheduler
from graphattn.sizing import EngineConfig, open_memory
from graphattn.step import step_program
from graphattn.stream import CudaStream, Stream

if TYPE_CHECKING:
    from graphattn._capture.audit import AuditReport
    from graphattn._capture.verify import VerifyReport


class Engine:
    """Serves requests by replaying captured steps. Made by `capture`. Not thread-safe."""

    def __init__(
        self,
        model: StepModel,
        config: EngineConfig,
        stream: Stream,
        progress: Progress | None = None,
    ) -> None:
        self.config = config
        bounds, device = config.bounds, config.device
        self._model = model
        self._stream = stream
        self._group = None if config.dcp is None else config.dcp.open()
        self._memory, self._drafter = open_memory(model, config, self._group)
        self._programs = {
            bucket: step_program(model, self._memory, bucket, self._drafter)
            for bucket in config.buckets
        }
        self._inputs = InputRing(bounds, device, steps_in_flight=config.run_ahead)
        self._prompts = PromptRing(bounds, device, prompts_in_flight=bounds.max_batch)
        self._outputs = OutputRing(bounds, device, steps_in_flight=config.run_ahead)
        self._scheduler = Scheduler(
            bounds, max_queue=config.max_queue, prompts_fit=self._prompts.has_room
        )
        self._events: deque[Event] = deque()
        self._replays = dict.fromkeys(config.buckets, 0)
        self._steps = self._emitted = self._submitted = self._finished = 0
        self._closed: str | None = None
        self._lockstep = open_lockstep(config, model)
        self._last_landed = time.monotonic()
        started = time.perf_counter()
        self._graphs = self._capture(progress)
        self._capture_seconds = time.perf_counter() - started

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return not self._scheduler.idle

    @property
    def leads(self) -> bool:
        """Whether this process takes requests; ranks of a process group other than 0 `follow`."""
        return self._lockstep is None or self._lockstep.leads

    def submit(
        self,
        token_ids: Sequence[int],
        params: SamplingParams | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Request:
        """Queue a request; its fields can be given as `SamplingParams` or as keywords.

        Raises `RequestError` when it can never be served, `QueueFullError` at the queue's bound,
        `EngineClosedError`. After an error nothing has changed.
        """
        self._check_leads("submit")
        params = merge_params(params, fields)
        request = self._new_request(token_ids, params, 0)
        self._scheduler.submit(request)
        self._submitted += 1
        return request

    def step(self, bucket: Bucket | None = None) -> bool:
        """Launch one step, if there is something to do and fewer than `run_ahead` are unread.

        Never waits for the device. Returns whether a step was launched. With a `bucket` that very
        graph is launched, also when nothing is to be done: engines that share experts over
        data-parallel ranks must all launch, the idle ones too.

        Raises `StepError` when the launch failed; the engine is then closed and every request
        has ended with that error. `ConfigError` for a bucket that is not the engine's or that
        holds fewer rows than are decoding.
        """
        self._check_leads("step")
        self._read_landed()
        if not self._outputs.has_room:
            self._check_progress()
            return False
        if bucket is None:
            inputs = self._scheduler.plan(self.config.bounds.max_tokens)
            if not inputs.rows:
                return False
            bucket = self.config.buckets.smallest(inputs.tokens, mixed=inputs.mixed)
        else:
            self._check_bucket(bucket)
            inputs = self._scheduler.plan(bucket.tokens, mixed=bucket.mixed)
        self._launch_or_end(inputs, bucket)
        return True

    def follow(self) -> None:
        """Ranks other than 0 of a process group: launch what rank 0 launches, until it closes.

        Raises `StepError` when a step failed, or rank 0 or another rank is gone; the engine is
        then closed.
        """
        self._check_open()
        if (lockstep := self._lockstep) is None or self.leads:
            raise wrong("follow", "a rank other than 0 of a process group", "rank 0", "Use step.")
        buckets = {bucket.name: bucket for bucket in self.config.buckets}
        while True:
            try:
                message = lockstep.receive(self._steps)
            except StepError as error:
                self._end(str(error), FinishReason.ERROR)
                raise
            if message is None:
                return self.close()
            while not self._outputs.has_room:
                self._outputs.wait()
                self._outputs.landed()
            self._launch_or_end(message.inputs, buckets[message.bucket])

    def poll(self) -> list[Event]:
        """Everything that has landed since the last call, in order. Never waits.

        After `close` it still returns the events that were not handed out.
        """
        if self._closed is None:
            self._read_landed()
        events = list(self._events)
        self._events.clear()
        return events

    def generate(
        self,
        prompts: Iterable[Sequence[int]],
        params: SamplingParams | None = None,
        **fields: Unpack[SamplingFields],
    ) -> list[Completion]:
        """Serve `prompts` to the end; completions in the order of the prompts.

        All prompts are checked before the first is queued. More prompts than the queue holds are
        fed as it empties. Other requests run on beside them; their events wait for `poll`.
        """
        self._check_leads("generate")
        params = merge_params(params, fields)
        requests = [self._new_request(p, params, i) for i, p in enumerate(prompts)]
        pending = deque(requests)
        while not all(request.finished for request in requests):
            while pending and self._scheduler.waiting < self.config.max_queue:
                self._scheduler.submit(pending.popleft())
                self._submitted += 1
            if not self.step():
                self._outputs.wait()
            self._read_landed()
        own = set(requests)
        self._events = deque(e for e in self._events if e.request not in own)
        return [completion(request) for request in requests]

    def cancel(self, request: Request) -> bool:
        """End a request now; False when it had ended already."""
        self._check_open()
        event = self._scheduler.cancel(request)
        if event is None:
            return False
        self._report_event(event)
        return True

    def stats(self) -> Stats:
        """Counters since capture, and the state of the moment."""
        scheduler = self._scheduler
        return Stats(
            steps=self._steps,
            graph_hits=sum(self._replays.values()),
            fallbacks=self._steps - sum(self._replays.values()),
            in_flight=self._outputs.in_flight,
            tokens_emitted=self._emitted,
            tokens_drafted=sum(scheduler.drafted),
            tokens_accepted=sum(scheduler.accepted),
            accepted_by_place=tuple(scheduler.accepted),
            drafted_by_place=tuple(scheduler.drafted),
            requests_submitted=self._submitted,
            requests_finished=self._finished,
            running=scheduler.running,
            waiting=scheduler.waiting,
            pages_free=scheduler.pages.free,
            pages_taken=scheduler.pages.taken,
            events_pending=len(self._events),
        )

    def report(self) -> EngineReport:
        """What was captured and what it costs; `print(engine.report())` gives a table."""
        return engine_report(
            self.config,
            self._memory,
            self._pools(),
            [
                bucket_report(bucket, graph, self._replays[bucket])
                for bucket, graph in sorted(self._graphs.items(), key=lambda item: item[0])
            ],
            capture_seconds=self._capture_seconds,
        )

    def audit(self) -> AuditReport:
        """Run the largest decode and mixed step on a fake CUDA device and list what would break a
        CUDA graph: host reads, data-dependent shapes, copies between host and device."""
        from graphattn._capture.audit import audit

        self._check_open()
        buckets = self.config.buckets
        programs = [self._programs[group[-1]] for group in (buckets.decode, buckets.mixed)]
        return audit(lambda: [program() for program in programs])

    def verify(self, steps: int = 50, *, seed: int = 0) -> VerifyReport:
        """Replay against the eager step, bit for bit, over `steps` steps of random requests.

        Everything that a step must rewrite is spoiled with NaN and huge indices before its replay.
        Needs an idle engine, whose slot state it leaves as it was. With prepacked linears a replay
        rounds differently from eager; capture with `prepack=False` to verify.

        Raises `ConfigError` when the engine is busy or prepacked.
        """
        self._check_open()
        if self.busy or self._outputs.in_flight:
            raise wrong("verify", "an idle engine", "requests in flight", "Finish them first.")
        if self.config.prepack:
            raise wrong(
                "verify", "an engine without prepacked linears", "prepack=True", "See `prepack`."
            )
        parts = (self._memory, self._drafter, self._programs, self._graphs, self._stream)
        return Checkup(self.config, *parts, seed=seed).run(steps)

    def close(self) -> None:
        """End every request as cancelled and free the graphs. Idempotent."""
        if self._closed is None:
            self._end("the engine was closed by its owner", FinishReason.CANCELLED)

    def __enter__(self) -> Self:
        """The engine itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close it."""
        self.close()

    def _capture(self, progress: Progress | None) -> dict[Bucket, Graph]:
        """Capture on idle inputs: all rows are padding, so no slot, page or token changes."""
        self._stream.join()
        by_name = {bucket.name: bucket for bucket in self._programs}
        graphs = capture_family(
            {bucket.name: program for bucket, program in self._programs.items()},
            backend=self.config.backend,
            device=self.config.device,
            stream=self._stream.cuda if isinstance(self._stream, CudaStream) else None,
            weights=weights(self._model) | (self._drafter.weights() if self._drafter else {}),
            prepack=self.config.prepack,
            untouched=tuple(self._pools().values()),
            progress=progress,
        )
        return {by_name[name]: graph for name, graph in graphs.items()}

    def _pools(self) -> dict[str, Tensor]:
        """KV pools of the model and of its drafter, by name."""
        return self._memory.target.pools() | (self._drafter.pools() if self._drafter else {})

    def _launch_or_end(self, inputs: StepInputs, bucket: Bucket) -> None:
        try:
            self._launch(inputs, bucket)
        except Exception as error:
            reason = f"step {self._steps} ({bucket.name}) failed: {type(error).__name__}: {error}"
            if self._lockstep is not None:
                reason += f"; {self._lockstep.blame()}"
            self._end(reason, FinishReason.ERROR)
            raise StepError(f"{reason}. The engine is closed.") from error
        self._replays[bucket] += 1
        self._steps += 1

    def _launch(self, inputs: StepInputs, bucket: Bucket) -> None:
        """One copy in, the prompts of admitted slots, one replay, one copy out."""
        if self._lockstep is not None and self._lockstep.leads:
            self._lockstep.send(Message(self._steps, bucket.name, inputs))
        self._stream.join()
        with nvtx_ranges.scope(f"replay.{bucket.name}"):
            history = self._memory.state.history
            for admission in inputs.admissions:
                self._prompts.send(admission.tokens, history[admission.slot], self._stream)
            self._inputs.send(inputs, self._memory.inputs, self._stream)
            self._stream.submit(self._graphs[bucket].replay)
            self._outputs.receive(self._steps, self._memory.output, self._stream)

    def _read_landed(self) -> None:
        for result in self._outputs.landed():
            self._last_landed = time.monotonic()
            for event in self._scheduler.read(result):
                self._report_event(event)

    def _report_event(self, event: Event) -> None:
        self._events.append(event)
        self._emitted += len(event.token_ids)
        self._finished += event.finished

    def _end(self, reason: str, finish: FinishReason) -> None:
        """Close: give every request a definite end, then free the graphs."""
        self._closed = reason
        for request in self._scheduler.requests():
            self._scheduler.cancel(request)
            request.finish_reason, request.error = finish, reason
            self._report_event(Event(request, (), (), True, finish, reason))
        if self._lockstep is not None and self._lockstep.leads:
            self._lockstep.send_close(self._steps)
        if self._outputs.in_flight and finish is FinishReason.CANCELLED:
            self._stream.mark().wait()
        for graph in self._graphs.values():
            graph.close()
        if self._lockstep is not None:
            self._lockstep.close()
        if self._group is not None:
            self._group.close()

    def _check_leads(self, call: str) -> None:
        self._check_open()
        if self._lockstep is not None and not self.leads:
            raise wrong(call, "rank 0 of the group", f"rank {self._lockstep.rank}", "Use follow.")

    def _check_bucket(self, bucket: Bucket) -> None:
        if bucket not in self._graphs:
            names = ", ".join(b.name for b in sorted(self._graphs))
            raise wrong("bucket", f"one of {names}", bucket, "Take it from engine.config.buckets.")
        needed = self._scheduler.decoding * self.config.bounds.decode_query_len
        if needed > bucket.tokens:
            raise wrong(
                "bucket", f"at least {needed} token places", bucket.name, "Every row must decode."
            )

    def _check_progress(self) -> None:
        """A captured collective cannot time out: end it from here when its step never lands."""
        if self._lockstep is None or self.config.dcp is None or self._group is None:
            return
        waited = time.monotonic() - self._last_landed
        if waited > self.config.dcp.timeout:
            reason = f"no step has landed for {waited:.0f} s: {self._lockstep.blame()}"
            self._group.abort()
            self._end(reason, FinishReason.ERROR)
            raise StepError(f"{reason}. The engine is closed.")

    def _check_open(self) -> None:
        if self._closed is not None:
            raise EngineClosedError(f"{self._closed}; capture a new one")

    def _new_request(
        self, token_ids: Sequence[int], params: SamplingParams, offset: int
    ) -> Request:
        return new_request(
            self._submitted + offset,
            token_ids,
            params,
            self.config.bounds,
            self._model.eos_token_ids,
        )
