"""Replay against eager, bit for bit, on the same memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .graph import Graph

TWICE = 2  # steps in which eager runs twice at once
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(frozen=True, slots=True)
class Difference:
    """First element in which two runs of one step differ, and in how many they do."""

    step: int
    name: str
    index: tuple[int, ...]
    eager: bool | int | float | complex
    other: bool | int | float | complex
    num_elements: int

    def __str__(self) -> str:
        where = ", ".join(map(str, self.index))
        return (
            f"step {self.step}: {self.name}[{where}] is {self.eager!r} eagerly and {self.other!r} "
            f"otherwise ({self.num_elements} elements differ)"
        )


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Verdict of `verify`.

    `steps` compared, `difference` of replay from eager at the first step that had one,
    `unstable` differences of eager from eager (the first per tensor; such tensors are not held
    against the replay), `moved` names of the watched tensors whose address changed, `failure` what
    a replay raised that relied on something spoiled.
    """

    steps: int
    difference: Difference | None
    unstable: tuple[Difference, ...]
    moved: tuple[str, ...]
    failure: str | None = None

    @property
    def ok(self) -> bool:
        """Whether replay equalled eager, eager equalled itself, and nothing moved or failed."""
        found = (self.difference, self.unstable, self.moved, self.failure)
        return not any(found)

    def __str__(self) -> str:
        if self.ok:
            return f"verify: replay equals eager bit for bit in {self.steps} steps"
        lines = [f"replay differs at {self.difference}"] if self.difference else []
        lines += [f"eager is not deterministic at {difference}" for difference in self.unstable]
        lines += [f"{name} moved to another address" for name in self.moved]
        lines += [self.failure] if self.failure else []
        return "verify: " + "; ".join(lines)


def verify(
    eager: Callable[[], None],
    graph: Graph | Callable[[], None],
    *,
    inputs: Callable[[int], None],
    watch: Mapping[str, Tensor],
    steps: int,
    poison: Callable[[], None] | None = None,
) -> VerifyReport:
    """Compare replays of `graph` with runs of `eager`, the same program, for `steps` steps.

    Each step calls `inputs(step)`, then runs `eager` and the replay, each from the same contents of
    the tensors in `watch` and the same random states; in the first two steps, and where the replay
    differs, `eager` a second time, to see whether it equals itself. `watch` holds all state that
    the program reads and writes, and what else is to be compared; it is read anew in each step,
    so that a live mapping such as `vars(buffers)` shows a tensor that was re-created. `poison`
    spoils, before the replay, memory that the step must not rely on.

    The state goes on from the replay's result. Ends at the first difference.
    """
    if isinstance(graph, Graph):
        eager, replay = partial(graph.run_eagerly, eager), graph.replay
    else:
        replay = graph
    run = _Runs(watch)
    addresses = {name: tensor.data_ptr() for name, tensor in watch.items()}
    unstable: dict[str, Difference] = {}
    difference: Difference | None = None
    moved: tuple[str, ...] = ()
    failure: str | None = None
    done = 0

    def note(found: list[Difference]) -> None:
        unstable.update({d.name: unstable.get(d.name, d) for d in found})

    def unexplained(found: list[Difference]) -> Difference | None:
        return next((d for d in found if d.name not in unstable), None)

    with torch.no_grad():
        for step in range(steps):
            inputs(step)
            run.remember()
            reference = run.results(eager)
            if step < TWICE:
                note(_differences(step, reference, run.results(eager)))
            try:
                result = run.results(replay, poison)
            except (IndexError, RuntimeError, ValueError) as error:
                failure = f"step {step}: the replay failed: {type(error).__name__}: {error}"
                break
            difference = unexplained(_differences(step, reference, result))
            if difference is not None and step >= TWICE:
                note(_differences(step, reference, run.results(eager)))
                again = run.results(replay, poison)  # the state goes on from the replay's result
                difference = unexplained(_differences(step, reference, again))
            done += 1
            moved = tuple(n for n, tensor in watch.items() if tensor.data_ptr() != addresses[n])
            if difference is not None or moved:
                break
    return VerifyReport(done, difference, tuple(unstable.values()), moved, failure)


class _Runs:
    """Runs programs from one remembered state."""

    def __init__(self, watch: Mapping[str, Tensor]) -> None:
        self._watch = watch
        self._cuda = any(tensor.is_cuda for tensor in watch.values())
        self._state: dict[str, Tensor] = {}
        self._random: list[tuple[Callable[[Tensor], None], Tensor]] = []

    def remember(self) -> None:
        self._state = self._copy()
        self._random = [(torch.set_rng_state, torch.get_rng_state())]
        if self._cuda:
            self._random.append((torch.cuda.set_rng_state, torch.cuda.get_rng_state()))

    def results(
        self, program: Callable[[], None], poison: Callable[[], None] | None = None
    ) -> dict[str, Tensor]:
        for name, tensor in self._watch.items():
            tensor.copy_(self._state[name])
        for restore, state in self._random:
            restore(state)
        if poison is not None:
            poison()
        self._settle()
        program()
        self._settle()
        return self._copy()

    def _settle(self) -> None:
        """The program may run on a stream of its own."""
        if self._cuda:
            torch.cuda.synchronize()

    def _copy(self) -> dict[str, Tensor]:
        return {
            name: tensor.clone(memory_format=torch.contiguous_format)
            for name, tensor in self._watch.items()
        }


def _differences(step: int, eager: dict[str, Tensor], other: dict[str, Tensor]) -> list[Difference]:
    """The first difference of each tensor, in the order of the names."""
    found = (_difference(step, name, tensor, other[name]) for name, tensor in eager.items())
    return [difference for difference in found if difference is not None]


def _difference(step: int, name: str, eager: Tensor, other: Tensor) -> Difference | None:
    bits = _BITS[eager.element_size()]
    if torch.equal(eager.reshape(-1).view(bits), other.reshape(-1).view(bits)):
        return None
    unequal = (eager.reshape(-1, 1).view(bits) != other.reshape(-1, 1).view(bits)).any(1)
    unequal &= ~(eager.isnan() & other.isnan()).reshape(-1)  # a NaN is a NaN, whatever its payload
    if not unequal.any():
        return None
    first = int(unequal.nonzero()[0])
    index = torch.unravel_index(torch.tensor(first), eager.shape)
    return Difference(
        step=step,
        name=name,
        index=tuple(int(i) for i in index),
        eager=eager.reshape(-1)[first].item(),
        other=other.reshape(-1)[first].item(),
        num_elements=int(unequal.sum()),
    )
