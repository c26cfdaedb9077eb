"""Engine.verify: every kind of step, replayed and run eagerly over the same memory, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from graphattn._capture.poison import poison
from graphattn._capture.verify import VerifyReport, verify
from graphattn.config import Bucket, BucketSet
from graphattn.errors import wrong
from graphattn.inputs import InputRing, PromptRing, StepInputs
from graphattn.policy import first_come
from graphattn.request import SamplingParams, new_request
from graphattn.ring import OutputRing
from graphattn.runner import Runner
from graphattn.scheduler import Scheduler

if TYPE_CHECKING:
    from graphattn._capture.audit import AuditReport

ARRIVAL_CHANCE = 0.4  # of a new request before a step: batches grow, shrink and cross buckets


def audit_programs(
    programs: Mapping[Bucket, Callable[[], None]], buckets: BucketSet
) -> AuditReport:
    """The largest decode and mixed step on a fake CUDA device."""
    from graphattn._capture.audit import audit

    largest = [programs[group[-1]] for group in (buckets.decode, buckets.mixed)]
    return audit(lambda: [program() for program in largest])


class Checkup:
    """Random requests through a scheduler of its own, over an idle engine's memory.

    Before each replay everything that the step is to rewrite is spoiled: scratch buffers, the KV
    entries that the eager run has just written, unused history, unused page-table columns.
    """

    def __init__(self, runner: Runner, *, seed: int) -> None:
        config, memory, drafter = runner.config, runner.memory, runner.drafter
        if config.prepack:
            raise wrong(
                "verify", "an engine without prepacked linears", "prepack=True", "See `prepack`."
            )
        bounds, device = config.bounds, config.device
        self._config, self._memory, self._stream = config, memory, runner.stream
        self._programs, self._graphs = runner.programs, runner.graphs
        self._random = random.Random(seed)
        self._inputs = InputRing(bounds, device, steps_in_flight=1)
        self._prompts = PromptRing(bounds, device, prompts_in_flight=bounds.max_batch)
        self._outputs = OutputRing(bounds, device, steps_in_flight=1)
        self._scheduler = Scheduler(
            bounds,
            max_queue=bounds.max_batch,
            window=0,
            lookahead=None,
            prompts_fit=self._prompts.has_room,
        )
        self._entries = {  # what a run leaves in the pages at the places of its tokens
            name: torch.zeros(bounds.max_tokens, pool.shape[1], pool.shape[3]).to(pool)
            for name, pool in memory.target.pools().items()
        }
        self._places: list[Tensor] = []  # KV slots that the eager run wrote, by shard
        self._watched = {} if drafter is None else drafter.lasting()
        self._choose(config.buckets.decode[0])
        drafter_scratch = {} if drafter is None else drafter.scratch()
        self._spoiled = [*memory.scratch().values(), *drafter_scratch.values()]

    def run(self, steps: int) -> VerifyReport:
        """Verify `steps` steps. The slot state is as before afterwards; page contents are not."""
        state = self._memory.lasting()
        before = {name: tensor.clone() for name, tensor in state.items()}
        try:
            return verify(
                self._eager,
                self._replay,
                inputs=self._next_step,
                watch=self._watched,
                steps=steps,
                poison=self._spoil,
            )
        finally:
            for name, tensor in state.items():
                tensor.copy_(before[name])

    def _next_step(self, step: int) -> None:
        if step:
            self._outputs.receive(step - 1, self._memory.output, self._stream)
            self._outputs.wait()
            for result in self._outputs.landed():
                self._scheduler.read(result)
        inputs = self._plan(step)
        self._choose(self._config.buckets.smallest(inputs.tokens, mixed=inputs.mixed))
        for admission in inputs.admissions:
            history = self._memory.state.history[admission.slot]
            self._prompts.send(admission.tokens, history, self._stream)
        self._inputs.send(inputs, self._memory.inputs, self._stream)
        self._stream.mark().wait()

    def _choose(self, bucket: Bucket) -> None:
        """The bucket of the next step, and what that step promises to write."""
        memory, bounds = self._memory, self._config.bounds
        self._bucket = bucket
        self._watched |= memory.lasting()
        for rank, step in enumerate(memory.target.narrow(bucket.tokens)):
            self._watched |= {f"step.{n}@{rank}": t for n, t in step.tensors().items()}
        places = bounds.logits_places(bucket.tokens)
        self._watched["sampled"] = memory.sampler.sampled[:places]
        self._watched["logprob"] = memory.sampler.logprob[:places]
        self._watched["output"] = memory.output.block
        self._watched |= self._entries

    def _plan(self, step: int) -> StepInputs:
        while True:
            idle = self._scheduler.idle
            if self._scheduler.waiting == 0 and (idle or self._random.random() < ARRIVAL_CHANCE):
                self._arrive(step)
            plan = first_come(self._scheduler, self._config.bounds.max_tokens, mixed=True)
            if (inputs := self._scheduler.apply(plan)).rows:
                return inputs

    def _arrive(self, step: int) -> None:
        bounds, rng = self._config.bounds, self._random
        longest = max(1, min(bounds.max_seq_len - 1, 2 * bounds.max_tokens))
        prompt = [rng.randrange(bounds.vocab_size) for _ in range(rng.randint(1, longest))]
        params = SamplingParams(
            max_new_tokens=rng.randint(1, 8),
            temperature=rng.choice([0.0, 0.7]),
            top_k=rng.choice([0, 20]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.1]),
            seed=step,
        )
        self._scheduler.submit(new_request(step, prompt, params, bounds, ()))

    def _eager(self) -> None:
        graph, program = self._graphs[self._bucket], self._programs[self._bucket]
        self._run(lambda: graph.run_eagerly(program))
        self._places = [s.kv_slot.clone() for s in self._memory.target.narrow(self._bucket.tokens)]
        self._gather()

    def _replay(self) -> None:
        self._run(self._graphs[self._bucket].replay)
        self._gather()

    def _run(self, program: Callable[[], None]) -> None:
        self._stream.submit(program)
        self._stream.mark().wait()

    def _gather(self) -> None:
        for name, (pool, page, offset) in self._written_entries().items():
            self._entries[name].zero_()
            self._entries[name][: len(page)] = pool[page, :, offset]

    def _spoil(self) -> None:
        poison(*self._spoiled)
        for pool, page, offset in self._written_entries().values():
            pool[page, :, offset] = float("nan")

    def _written_entries(self) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """Each pool, with page and offset of the entries that the eager run wrote."""
        entries = {}
        for shard, kv_slot in zip(self._memory.target.shards, self._places, strict=True):
            places = kv_slot[kv_slot >= 0]
            page, offset = places // shard.bounds.page_size, places % shard.bounds.page_size
            for name, pool in shard.pools.tensors().items():
                entries[f"{name}@{shard.bounds.dcp_rank}"] = pool, page, offset
        return entries
