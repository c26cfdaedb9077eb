"""The step program: the order of the stages. It is what is captured, and what eager runs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from graphattn._capture import nvtx_ranges
from graphattn.commit import commit
from graphattn.config import Bucket
from graphattn.draft import Drafter
from graphattn.memory import StepMemory
from graphattn.metadata import StepRows
from graphattn.models.contract import StepModel
from graphattn.view import ModelStep


def step_program(
    model: StepModel, memory: StepMemory, bucket: Bucket, drafter: Drafter | None = None
) -> Callable[[], None]:
    """The program of one bucket: a function of nothing over fixed memory."""
    state, inputs, output, target = memory.state, memory.inputs, memory.output, memory.target
    sampler, rows = memory.sampler, StepRows.of(inputs, state)
    steps = target.narrow(bucket.tokens)
    draft = None if drafter is None else drafter.program(bucket)

    @torch.no_grad()
    def program() -> None:
        memory.epoch.advance()
        with nvtx_ranges.scope("admit"):
            state.admit(inputs)
            sampler.admit(inputs, state, output)
        with nvtx_ranges.scope("prepare"):
            target.prepare(steps, rows)
        with nvtx_ranges.scope("model"):
            view = ModelStep(steps, target.attention, mixed=bucket.mixed, slots=memory.slots)
            logits = model(view)
        with nvtx_ranges.scope("sample"):
            sampled = sampler.draw(logits, inputs, steps[0], state)
            if memory.group is not None:
                memory.group.broadcast([sampled])
        if draft is not None:
            draft.remember()
        with nvtx_ranges.scope("commit"):
            commit(sampled, inputs.slot_of_row, steps[0], state, output)
            sampler.publish(inputs, steps[0], state, output)
            view.commit_slots()
        memory.epoch.advance()
        if draft is not None:
            with nvtx_ranges.scope("draft"):
                draft.run(view.features)

    return program
