"""Ranks of a process group launch the same steps: rank 0 decides, the others follow.

Decisions are host data and travel beside the device: rank 0 writes each step's inputs to the
group's key-value store, the others read them in order. No rank reads a device value to launch.
Each rank also writes how far it is, so that an error can name the rank that fell behind.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from graphattn.errors import ConfigError, StepError
from graphattn.groups import VirtualGroup
from graphattn.inputs import Admission, PageUpdate, Sampling, StepInputs
from graphattn.models import weights
from graphattn.models.contract import StepModel
from graphattn.sizing import EngineConfig

KEPT = 64  # messages that stay readable; ranks are never further apart than the steps in flight
PULSE_SECONDS = 1.0
AGREE_FACTOR = 10  # ranks may enter capture this many time-outs apart


@dataclass(frozen=True, slots=True)
class Message:
    """One step as rank 0 decided it."""

    step: int
    bucket: str
    inputs: StepInputs


class Lockstep:
    """The control channel of one engine on one rank of `group`.

    `timeout` seconds bound how long a rank waits for another. Closing is idempotent.
    """

    _count = 0  # engines of this process, in the same order on every rank

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        Lockstep._count += 1
        prefix = f"graphattn/{group.group_name}/{Lockstep._count}"
        self._store = PrefixStore(prefix, _get_default_store())
        self.rank, self.size = group.rank(), group.size()
        self._timeout = timeout
        self._step = 0
        self._stop = threading.Event()
        self._pulse = threading.Thread(target=self._beat, name="graphattn-pulse", daemon=True)

    @property
    def leads(self) -> bool:
        """Whether this rank takes requests and decides the steps."""
        return self.rank == 0

    def agree(self, facts: Mapping[str, str]) -> None:
        """Wait for all ranks and compare; `ConfigError` naming the first difference."""
        self._store.set(f"facts/{self.rank}", json.dumps(dict(facts)))
        for rank in range(self.size):
            theirs = json.loads(self._get(f"facts/{rank}", self._timeout * AGREE_FACTOR, rank))
            for name, mine in facts.items():
                if theirs.get(name) != mine:
                    raise ConfigError(
                        f"{name}: wanted the same on every rank, got {mine!r} on rank "
                        f"{self.rank} and {theirs.get(name)!r} on rank {rank}. "
                        "Capture with the same model and arguments everywhere."
                    )
        self._pulse.start()

    def send(self, message: Message) -> None:
        """Rank 0: publish a step."""
        self._step = message.step
        self._store.set(f"step/{message.step}", json.dumps(asdict(message)))
        if message.step >= KEPT:
            self._store.delete_key(f"step/{message.step - KEPT}")

    def send_close(self, step: int) -> None:
        """Rank 0: there is no step `step`; the others close."""
        self._store.set(f"step/{step}", json.dumps(None))

    def receive(self, step: int) -> Message | None:
        """Other ranks: wait for step `step`; None when rank 0 has closed.

        Waits as long as rank 0 shows life. Raises `StepError` when it does not.
        """
        self._step = step
        while True:
            try:
                return _message(json.loads(self._get(f"step/{step}", self._timeout, 0)))
            except StepError:
                if 0 in self._silent():
                    raise

    def blame(self) -> str:
        """Which ranks have gone silent or fallen behind, in words. Takes a few seconds."""
        if silent := self._silent():
            return f"no sign of life from rank {_listed(silent)}"
        steps = {rank: int(pulse.split()[0]) for rank, pulse in self._pulses().items()}
        behind = [rank for rank, step in steps.items() if step == min(steps.values())]
        if len(behind) < self.size:
            return f"rank {_listed(behind)} is at step {min(steps.values())}, others are further"
        return "every rank is alive and at the same step"

    def close(self) -> None:
        """Stop showing life."""
        self._stop.set()
        if self._pulse.is_alive():
            self._pulse.join()

    def _get(self, key: str, seconds: float, rank: int) -> str:
        try:
            self._store.wait([key], timedelta(seconds=seconds))
            return self._store.get(key).decode()
        except dist.DistError as error:
            raise StepError(
                f"rank {self.rank} waited {seconds:.0f} s for rank {rank} in vain: "
                f"{type(error).__name__}"
            ) from error

    def _beat(self) -> None:
        beats = 0
        while not self._stop.is_set():
            beats += 1
            try:
                self._store.set(f"pulse/{self.rank}", f"{self._step} {beats}")
            except dist.DistError:
                return  # the store's host is gone; the next step says so
            self._stop.wait(PULSE_SECONDS)

    def _pulses(self) -> dict[int, str]:
        """Step and beat of each rank, empty for one that cannot be read."""
        pulses = {}
        for rank in range(self.size):
            try:
                pulses[rank] = self._get(f"pulse/{rank}", PULSE_SECONDS, rank)
            except StepError:
                pulses[rank] = ""
        return pulses

    def _silent(self) -> list[int]:
        """Ranks whose pulse stands still."""
        before = self._pulses()
        self._stop.wait(3 * PULSE_SECONDS)
        after = self._pulses()
        return [rank for rank in before if before[rank] == after[rank]]


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _message(data: dict[str, object] | None) -> Message | None:
    if data is None:
        return None
    inputs = data["inputs"]
    assert isinstance(inputs, dict)
    return Message(
        step=data["step"],  # type: ignore[arg-type]
        bucket=data["bucket"],  # type: ignore[arg-type]
        inputs=StepInputs(
            rows=[tuple(row) for row in inputs["rows"]],
            admissions=[
                Admission(**(a | {"sampling": Sampling(**a["sampling"])}))
                for a in inputs["admissions"]
            ],
            releases=inputs["releases"],
            page_updates=[PageUpdate(**u) for u in inputs["page_updates"]],
            mixed=inputs["mixed"],
        ),
    )


def open_lockstep(config: EngineConfig, model: StepModel) -> Lockstep | None:
    """The channel of an engine whose ranks are processes, once all of them agree; else None."""
    if config.dcp is None or isinstance(config.dcp.group, VirtualGroup):
        return None
    lockstep = Lockstep(config.dcp.group, config.dcp.timeout)
    lockstep.agree(_facts(config, model))
    return lockstep


def _facts(config: EngineConfig, model: StepModel) -> dict[str, str]:
    """What must be the same on every rank, by the names a caller knows."""
    dcp, bounds = config.dcp, config.bounds
    assert dcp is not None
    facts = {f.name: str(getattr(bounds, f.name)) for f in fields(bounds)}
    return facts | {
        "reduce": dcp.reduce,
        "buckets": ", ".join(bucket.name for bucket in config.buckets),
        "backend": config.backend,
        "speculate": _numbers(config.speculate),
        "run_ahead": str(config.run_ahead),
        "model": type(model).__name__,
        "attention layers": str([replace(x, sinks=None) for x in model.attention_layers]),
        "weights": _fingerprint(model),
    }


def _numbers(options: object) -> str:
    """A dataclass by its name and its numbers, whatever models it holds."""
    if not is_dataclass(options):
        return str(options)
    values = {f.name: getattr(options, f.name) for f in fields(options)}
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    return f"{type(options).__name__}({', '.join(f'{n}={v}' for n, v in numbers.items())})"


def _fingerprint(model: StepModel) -> str:
    """Of the vectors among the weights: norms, biases. Tensor parallelism leaves norms whole."""
    norms = [p for name, p in weights(model).items() if p.dim() == 1 and "norm" in name]
    digest = hashlib.sha256()
    for parameter in norms:
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
