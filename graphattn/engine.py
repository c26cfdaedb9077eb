"""Engine: composes the parts, holds no arithmetic.

    OPEN --close(), or a failed step--> CLOSED

`step` launches one replay and never waits for the device; `poll` hands out what has landed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Unpack

from torch import Tensor

from graphattn.checkup import Checkup, audit_programs
from graphattn.config import Bucket
from graphattn.errors import ConfigError, EngineClosedError, StepError, wrong
from graphattn.lockstep import Message, open_lockstep
from graphattn.models.contract import StepModel
from graphattn.outbox import Outbox
from graphattn.plan import Plan, Work
from graphattn.policy import first_come
from graphattn.report import (
    EngineReport,
    Progress,
    Stats,
    engine_report,
    engine_stats,
)
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
from graphattn.runner import Runner
from graphattn.scheduler import Scheduler
from graphattn.sizing import EngineConfig, prefix_lookahead, widest_window
from graphattn.stream import Stream

if TYPE_CHECKING:
    from graphattn._capture.audit import AuditReport
    from graphattn._capture.verify import VerifyReport


class Engine(AbstractContextManager["Engine"]):
    """Serves requests by replaying captured steps. Made by `capture`. Not thread-safe."""

    def __init__(
        self,
        model: StepModel,
        config: EngineConfig,
        stream: Stream,
        progress: Progress | None = None,
    ) -> None:
        self.config = config
        self._model = model
        self._group = None if config.dcp is None else config.dcp.open()
        self._runner = Runner(model, config, stream, self._group)
        self._outputs = self._runner.outputs
        self._scheduler = Scheduler(
            config.bounds,
            max_queue=config.max_queue,
            window=widest_window(model, config.speculate),
            lookahead=prefix_lookahead(config),
            prompts_fit=self._runner.prompts.has_room,
        )
        self._version = self._runner.weights.version
        self._outbox = Outbox(config.max_queue)
        self._submitted = 0
        self._closed: str | None = None
        self._lockstep = open_lockstep(config, model)
        self._last_landed = time.monotonic()
        try:
            self._runner.capture(progress)
        except BaseException:
            self._release(drain=False)
            raise

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
        self._outbox.check_polled()
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

        Raises `StepError` when the step failed; the engine is then closed and every request
        has ended with that error. So it is when a signal breaks in. `ConfigError` for a bucket
        that is not the engine's or that holds fewer rows than are decoding.
        """
        self._check_leads("step")
        if not self._ready():
            return False
        if bucket is not None:
            needed = self._scheduler.decoding * self.config.bounds.decode_query_len
            self.config.buckets.check(bucket, needed)
            plan = first_come(self._scheduler, bucket.tokens, mixed=bucket.mixed)
        else:
            plan = first_come(self._scheduler, self.config.bounds.max_tokens, mixed=True)
        return self._launch_plan(plan, bucket)

    def launch(self, plan: Plan) -> bool:
        """Launch one step of the caller's own scheduling; False while `run_ahead` are unread.

        `work` lists what can be planned. Raises `ConfigError`, and changes nothing, for a plan that
        cannot be launched; `StepError` as `step` does.
        """
        self._check_leads("launch")
        if not self._ready(planned=True):
            return False
        self._scheduler.check(plan, self.config.bounds.max_tokens)
        return self._launch_plan(plan, None)

    def work(self) -> list[Work]:
        """Every request that has not ended: first those in a slot, first come first."""
        self._check_leads("work")
        self._read_landed()
        return self._scheduler.work()

    def forget_prefixes(self) -> None:
        """No later request finds the KV of earlier ones."""
        self._scheduler.pages.forget()

    def weights_changed(self) -> None:
        """Weights were written in place by means that torch does not count: through `data`, by a
        fused optimizer, by a kernel of one's own. What it counts is noticed without this."""
        self.forget_prefixes()
        self._runner.weights_changed()

    def recapture(self) -> None:
        """Capture anew over the weights as they lie now, after they were exchanged.

        Waits for the steps in flight. Running requests are preempted: they keep their tokens, and
        go on from a KV computed with the new weights.

        Raises `ConfigError`, and changes nothing, when a weight has another shape, dtype or device,
        or for ranks of a process group. `StepError` when the capture failed: the engine is closed.
        """
        self._check_open()
        if self._lockstep is not None:
            raise wrong("recapture", "one process", "a process group", "Capture a new engine.")
        while self._outputs.in_flight:
            self._outputs.wait()
            self._read_landed()
        with self._whole("recapture"):
            self._runner.recapture()
            self._scheduler.preempt_all()
        self.forget_prefixes()
        self._version = self._runner.weights.version

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
                message = lockstep.receive(self._runner.steps)
            except StepError as error:
                self._end(str(error), FinishReason.ERROR)
                raise
            if message is None:
                return self.close()
            self._outputs.make_room()
            with self._whole(f"step {message.step}"):
                self._runner.weights.check(all=bool(message.inputs.admissions))
                self._runner.launch(message.inputs, buckets[message.bucket])

    def poll(self, timeout: float = 0.0) -> list[Event]:
        """Everything that has landed since the last call, in order.

        Waits up to `timeout` seconds for the oldest step in flight when nothing has; 0 never waits.
        After `close` it still returns the events that were not handed out.
        """
        if self._closed is None:
            self._read_landed()
            if not self._outbox and timeout > 0:
                self._outputs.wait(timeout)
                self._read_landed()
        return self._outbox.take()

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
        self._outbox.discard(requests)
        return [completion(request) for request in requests]

    def cancel(self, request: Request) -> bool:
        """End a request now; False when it had ended already."""
        self._check_open()
        with self._whole("cancelling a request"):
            if (event := self._scheduler.cancel(request)) is not None:
                self._outbox.put(event)
        return event is not None

    def stats(self) -> Stats:
        """Counters since capture, and the state of the moment."""
        return engine_stats(
            self._scheduler,
            self._outbox,
            steps=self._runner.steps,
            graph_hits=sum(self._runner.replays.values()),
            in_flight=self._outputs.in_flight,
            requests_submitted=self._submitted,
        )

    def report(self) -> EngineReport:
        """What was captured and what it costs; `print(engine.report())` gives a table."""
        return engine_report(self._runner)

    def pools(self) -> dict[str, Tensor]:
        """The KV pools by name, drafters' too: to look at, while no step is in flight.

        "keys.3@0": keys of layer 3 on rank 0, [num_pages, num_kv_heads, page_size, head_dim].
        """
        return self._runner.pools()

    def audit(self) -> AuditReport:
        """Run the largest decode and mixed step on a fake CUDA device and list what would break a
        CUDA graph: host reads, data-dependent shapes, copies between host and device."""
        self._check_open()
        return audit_programs(self._runner.programs, self.config.buckets)

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
        self._scheduler.pages.forget()  # a checkup writes into the pages
        return Checkup(self._runner, seed=seed).run(steps)

    def close(self) -> None:
        """End every request as cancelled and free the graphs. Idempotent."""
        if self._closed is None:
            self._end("the engine was closed by its owner", FinishReason.CANCELLED)

    def __exit__(self, *exception: object) -> None:
        """Close it."""
        self.close()

    def _ready(self, *, planned: bool = False) -> bool:
        """Read what has landed; whether there is room for one more step. One that is `planned` by
        the caller can admit a request into a slot that it empties."""
        self._read_landed()
        if not self._outputs.has_room:
            self._check_progress()
            return False
        admits = self._scheduler.waiting > 0 and (planned or bool(self._scheduler.free_slots))
        self._runner.weights.check(all=admits)
        if admits and (now := self._runner.weights.version) != self._version:
            self._version = now
            self._scheduler.pages.forget()
        return True

    def _launch_plan(self, plan: Plan, bucket: Bucket | None) -> bool:
        step = self._runner.steps
        with self._whole(f"step {step}"):
            inputs = self._scheduler.apply(plan, idle=bucket is not None)
            if bucket is None:
                if not inputs.rows:
                    return False
                bucket = self.config.buckets.smallest(inputs.tokens, mixed=inputs.mixed)
            if self._lockstep is not None:
                self._lockstep.send(Message(step, bucket.name, inputs))
            self._runner.launch(inputs, bucket)
        return True

    def _read_landed(self) -> None:
        with self._whole("reading what has landed"):
            for result in self._outputs.landed():
                self._last_landed = time.monotonic()
                self._outbox.put(*self._scheduler.read(result))

    @contextmanager
    def _whole(self, what: str) -> Iterator[None]:
        """Broken off half way, by an error or a signal, nothing can go on: the engine is closed.
        A `ConfigError` is raised before anything is changed."""
        try:
            yield
        except ConfigError:
            raise
        except BaseException as error:
            reason = f"{what} failed: {type(error).__name__}: {error}"
            if self._lockstep is not None and isinstance(error, Exception):
                reason += f"; {self._lockstep.blame()}"
            self._end(reason, FinishReason.ERROR)
            if isinstance(error, Exception):
                raise StepError(f"{reason}. The engine is closed.") from error
            raise

    def _end(self, reason: str, finish: FinishReason) -> None:
        """Close: give every request a definite end, then free the graphs."""
        self._closed = reason
        for request in self._scheduler.drop():
            if not request.finished:
                request.finish_reason, request.error = finish, reason
            self._outbox.put(Event(request, (), (), True, request.finish_reason, request.error))
        if self._lockstep is not None and self._lockstep.leads:
            self._lockstep.send_close(self._runner.steps)
        self._release(drain=finish is FinishReason.CANCELLED)

    def _release(self, *, drain: bool) -> None:
        """Free the graphs and leave the group, once the steps in flight have ended if `drain`."""
        self._runner.close(drain=drain)
        if self._lockstep is not None:
            self._lockstep.close()
        if self._group is not None:
            self._group.close()

    def _check_leads(self, call: str) -> None:
        self._check_open()
        if self._lockstep is not None and not self.leads:
            raise wrong(call, "rank 0 of the group", f"rank {self._lockstep.rank}", "Use follow.")

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

    def _new_request(self, tokens: Sequence[int], params: SamplingParams, offset: int) -> Request:
        number, eos = self._submitted + offset, self._model.eos_token_ids
        return new_request(number, tokens, params, self.config.bounds, eos)
