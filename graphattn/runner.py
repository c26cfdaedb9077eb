"""The device side of an engine: its memory, graphs and rings, on one stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property

from torch import Tensor

from graphattn._capture import nvtx_ranges
from graphattn._capture.graph import Graph
from graphattn.config import Bucket
from graphattn.footprint import Footprint, allocations, measure, predict
from graphattn.graphs import capture_graphs
from graphattn.groups import Group
from graphattn.inputs import InputRing, PromptRing, StepInputs
from graphattn.models import Weights
from graphattn.models.contract import StepModel
from graphattn.ring import OutputRing
from graphattn.sizing import EngineConfig, open_memory
from graphattn.step import step_program
from graphattn.stream import Stream


class Runner:
    """Launches steps and hands out what landed; what a step does is decided elsewhere."""

    def __init__(
        self, model: StepModel, config: EngineConfig, stream: Stream, group: Group | None
    ) -> None:
        bounds, device = config.bounds, config.device
        self.config = config
        self.stream = stream
        with allocations() as allocated:
            self.memory, self.drafter = open_memory(model, config, group)
            self.prompts = PromptRing(bounds, device, prompts_in_flight=bounds.max_batch)
            self.outputs = OutputRing(bounds, device, steps_in_flight=config.run_ahead)
            self._inputs = InputRing(bounds, device, steps_in_flight=config.run_ahead)
        self._model, self._allocated = model, allocated.kept()
        self.programs = {
            bucket: step_program(model, self.memory, bucket, self.drafter)
            for bucket in config.buckets
        }
        drafters = self.drafter.models() if self.drafter else {}
        self.weights = Weights({"": model} | drafters)
        self.graphs: dict[Bucket, Graph] = {}
        self.capture_seconds = 0.0
        self.steps = 0  # launched
        self.replays = dict.fromkeys(config.buckets, 0)
        self._copy_in = nvtx_ranges.within("copy_in", self._send)
        self._copy_out = nvtx_ranges.within("copy_out", self.outputs.receive)
        self._replay = {
            bucket: nvtx_ranges.within(f"replay.{bucket.name}", self._replay_step)
            for bucket in config.buckets
        }

    def pools(self) -> dict[str, Tensor]:
        """KV pools of the model and of its drafter, by name."""
        return self.memory.target.pools() | (self.drafter.pools() if self.drafter else {})

    @cached_property
    def predicted(self) -> Footprint:
        """What this should take, as it could be known before it was made, without the graphs."""
        return predict(self._model, self.config)

    def measured(self) -> Footprint:
        """What this takes."""
        infos = (graph.info for graph in self.graphs.values())
        return measure(self._allocated, infos, self.config.backend)

    def capture(self, progress: Callable[[str, int, int], None] | None) -> None:
        """Capture every bucket; `CaptureError` when it cannot be."""
        started = time.perf_counter()
        untouched = [*self.pools().values(), *self.memory.slots.tensors().values()]
        parts = (self.programs, self.config, self.stream, self.weights.parameters, untouched)
        self.graphs = capture_graphs(*parts, progress)
        self.capture_seconds = time.perf_counter() - started

    def recapture(self) -> None:
        """Capture every bucket anew over the weights as they are now, with nothing in flight.

        Raises `ConfigError`, and changes nothing, for weights of another shape, dtype or device.
        """
        self.weights = self.weights.followed()
        self._inputs.send(StepInputs(), self.memory.inputs, self.stream)  # all rows are padding
        self.stream.mark().wait()
        for graph in self.graphs.values():
            graph.close()
        self.capture(None)

    def weights_changed(self) -> None:
        """Copies of weights that graphs hold are made anew at the next replay."""
        for graph in self.graphs.values():
            graph.weights_changed()

    def launch(self, inputs: StepInputs, bucket: Bucket) -> None:
        """One copy in, the prompts of admitted slots, one replay, one copy out."""
        self.stream.join()
        nvtx_ranges.count("live_rows", len(inputs.rows))
        self._replay[bucket](inputs, self.graphs[bucket])
        self.replays[bucket] += 1
        self.steps += 1

    def _replay_step(self, inputs: StepInputs, graph: Graph) -> None:
        self._copy_in(inputs)
        self.stream.submit(graph.replay)
        self._copy_out(self.steps, self.memory.output, self.stream)

    def _send(self, inputs: StepInputs) -> None:
        history = self.memory.state.history
        for admission in inputs.admissions:
            self.prompts.send(admission.tokens, history[admission.slot], self.stream)
        self._inputs.send(inputs, self.memory.inputs, self.stream)

    def close(self, *, drain: bool) -> None:
        """Free the graphs, once the steps in flight have ended if `drain`."""
        if drain and self.outputs.in_flight:
            self.stream.mark().wait()
        for graph in self.graphs.values():
            graph.close()
