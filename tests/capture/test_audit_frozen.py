"""What never reaches the dispatcher, what a graph would freeze, and lines that allow a finding."""

import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphattn._capture.audit import AuditReport, audit

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="needs a CUDA build of torch (no GPU, no driver)"
)

BUFFER, SIDE = torch.zeros(8, 4), torch.zeros(3, 4)
LENGTHS = torch.tensor([3, 1])


def on_another_stream(x: Tensor) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        x.add_(1)


def staged(x: Tensor) -> None:
    staging = torch.zeros(3, 4, pin_memory=True)
    x.copy_(staging, non_blocking=True)


def into_too_small(x: Tensor) -> None:
    torch.add(x, x, out=torch.empty(2, device=x.device))


WAIT, STREAM, RANDOM = "synchronisation", "other stream", "random state"
HOST, TO_DEVICE, STORAGE = "host memory", "host-to-device copy", "storage change"

BAD: dict[str, tuple[Callable[[Tensor], Any], list[str]]] = {
    "synchronize": (lambda x: torch.cuda.synchronize(), [WAIT]),
    "stream synchronize": (lambda x: torch.cuda.current_stream().synchronize(), [WAIT]),
    "event query": (lambda x: torch.cuda.Event().query(), [WAIT]),
    "side stream": (on_another_stream, [STREAM]),
    "wait_stream": (lambda x: torch.cuda.current_stream().wait_stream(None), [STREAM]),
    "event": (lambda x: torch.cuda.Event().record(), [STREAM]),
    "record_stream": (lambda x: x.record_stream(torch.cuda.current_stream()), [STREAM]),
    "generator": (lambda x: torch.rand(3, device="cuda", generator=torch.Generator()), [RANDOM]),
    "bernoulli": (lambda x: x.bernoulli_(0.5, generator=torch.Generator()), [RANDOM]),
    "seed": (lambda x: torch.cuda.manual_seed(3), [RANDOM]),
    "global seed": (lambda x: torch.manual_seed(3), [RANDOM]),
    "rng state": (lambda x: torch.cuda.get_rng_state(), [RANDOM]),
    "pin": (lambda x: torch.zeros(3, 4).pin_memory(), [HOST]),
    "staged": (staged, [HOST, TO_DEVICE]),
    "empty_cache": (lambda x: torch.cuda.empty_cache(), [STORAGE]),
    "out": (into_too_small, [STORAGE]),
    "backward": (lambda x: x.sum().backward(), ["gradient"]),
}


def categories(report: AuditReport) -> list[str]:
    return [finding.category for finding in report.findings]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", BAD)
def test_found_at_its_line(name: str) -> None:
    program, wanted = BAD[name]
    report = audit(program, torch.ones(3, 4))
    assert categories(report) == wanted, str(report)
    first = program.__code__.co_firstlineno
    assert all(first <= finding.line <= first + 3 for finding in report.findings)
    assert all(finding.file == __file__ for finding in report.findings)


def test_a_pinned_copy_is_told_from_a_pageable_one() -> None:
    (_, pinned) = audit(staged, SIDE).findings
    (pageable,) = audit(lambda x: x.copy_(torch.zeros(3, 4)), SIDE).findings
    assert "freed and handed on" in pinned.reason
    assert "pinned" not in pageable.reason


class Step:
    """A step of a naive engine: what it keeps on the host moves on from run to run."""

    def __init__(self) -> None:
        self.length, self.scale, self.turn = 2, 0.5, 0
        self.cache = torch.zeros(2, 4)

    def advance(self) -> None:
        self.length += 1
        self.scale *= 2
        self.turn += 1

    def sliced(self, x: Tensor) -> Tensor:
        return BUFFER[: self.length] + x[:1]

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale

    def filled(self, x: Tensor) -> Tensor:
        return torch.full_like(x, self.length) + x

    def branched(self, x: Tensor) -> Tensor:
        return x.sin() if self.turn else x.cos()

    def renewed(self, x: Tensor) -> Tensor:
        return x + self.pool

    def grown(self, x: Tensor) -> Tensor:
        self.cache = torch.cat([self.cache, x])
        return self.cache.sum(0)

    def longer(self, x: Tensor) -> None:
        for _ in range(self.length):
            x.add_(1)


FROZEN, MOVED = "frozen host value", "other tensor"


@pytest.mark.parametrize(
    ("name", "category", "reason"),
    [
        ("sliced", FROZEN, "was given 2 in one run and 3 in the next"),
        ("scaled", FROZEN, "was given 0.5 in one run and 1.0 in the next"),
        ("filled", FROZEN, "was given 2 in one run and 3 in the next"),
        ("branched", FROZEN, "is not where the run before went"),
        ("grown", MOVED, "keeps the address of the first"),
        ("longer", FROZEN, "is not where the run before went"),
    ],
)
def test_what_moves_on_the_host_is_named_where_it_enters(
    name: str, category: str, reason: str
) -> None:
    step = Step()
    report = audit(getattr(step, name), torch.ones(3, 4), advance=step.advance)
    assert categories(report) == [category], str(report)
    (finding,) = report.findings
    assert reason in finding.reason
    assert finding.source in inspect.getsource(getattr(Step, name))


def test_a_tensor_that_is_made_anew_between_steps() -> None:
    """B2: metadata re-created per step, the graph kept the old address."""
    step = Step()
    step.pool = torch.zeros(4)

    def renew() -> None:
        step.pool = torch.zeros(4)

    report = audit(step.renewed, torch.ones(3, 4), advance=renew)
    assert categories(report) == [MOVED]
    assert audit(step.renewed, torch.ones(3, 4), advance=lambda: step.pool.add_(1)).ok


def test_a_pool_on_the_fake_device_that_is_made_anew() -> None:
    def made(x: Tensor) -> Tensor:
        made.pool = getattr(made, "pool", None)
        if made.pool is None:
            made.pool = torch.zeros(4, device=x.device)
        return x + made.pool

    report = audit(made, torch.ones(3, 4))
    assert categories(report) == [FROZEN], "lazy initialisation takes another way the second time"


def test_only_the_origin_of_a_difference_is_named() -> None:
    step = Step()

    def program(x: Tensor) -> Tensor:
        part = BUFFER[: step.length]
        part = part.view(part.shape[0] * 4).relu()
        return part[: part.shape[0]].sum() + x

    report = audit(program, torch.ones(3, 4), advance=step.advance)
    assert [finding.source for finding in report.findings] == ["part = BUFFER[: step.length]"]


CLEAN: dict[str, Callable[[Tensor], Any]] = {
    "lengths in a tensor": lambda x: torch.arange(8, device=x.device) < LENGTHS[:, None],
    "gather": lambda x: BUFFER.gather(0, LENGTHS[:, None].expand(2, 4)),
    "scatter": lambda x: BUFFER.scatter_add(0, LENGTHS[:, None].expand(2, 4), x[:2]),
    "cumsum": lambda x: LENGTHS.cumsum(0, dtype=torch.int32),
    "masked_fill": lambda x: x.masked_fill(x > 0, float("-inf")).softmax(-1),
    "nonzero_static": lambda x: torch.nonzero_static(x > 0, size=12, fill_value=0),
    "repeat_interleave": lambda x: x[:2].repeat_interleave(LENGTHS, 0, output_size=4),
    "argmax": lambda x: x.argmax(-1, keepdim=True),
    "multinomial": lambda x: torch.multinomial(x, 1),
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "sort": lambda x: x.sort(-1, descending=True).values.cumsum(-1),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "baddbmm": lambda x: torch.baddbmm(x[None], x[None], torch.ones(1, 4, 4, device=x.device)),
    "chunk": lambda x: torch.cat([half.mul(2) for half in x.chunk(2, -1)], -1),
    "split": lambda x: [part.add_(1) for part in x.split([1, 3], dim=-1)],
    "out": lambda x: torch.add(x, x, out=SIDE),
    "copy between device tensors": lambda x: SIDE.copy_(x, non_blocking=True),
    "strided write": lambda x: BUFFER[1:4].copy_(x),
    "conv": lambda x: torch.conv1d(x[None], torch.ones(3, 3, 2, device=x.device)),
    "norm": lambda x: torch.nn.functional.rms_norm(x, (4,)),
    "checks of torch.cuda": lambda x: x.add_(torch.cuda.current_device()),
    "not yet an event": lambda x: torch.cuda.current_stream(),
}


@pytest.mark.parametrize("name", CLEAN)
def test_clean_constructs_give_nothing(name: str) -> None:
    report = audit(CLEAN[name], torch.ones(3, 4))
    assert report.ok, str(report)


def test_a_line_allows_a_category_with_a_reason() -> None:
    def program(x: Tensor) -> None:
        x.sum().item()  # graphattn: allow host read: once per run, outside the loop
        # graphattn: allow data-dependent shape: a debug print
        x.nonzero()
        x.sum().item()  # graphattn: allow host read:
        x.max().item()  # graphattn: allow other stream: not what is found here

    report = audit(program, torch.ones(3, 4))
    assert categories(report) == ["host read", "host read"]
    assert [reason for _, reason in report.allowed] == [
        "once per run, outside the loop",
        "a debug print",
    ]
    assert not report.ok
    assert "allowed: " in str(report)


def test_as_json() -> None:
    def program(x: Tensor) -> None:
        x.sum().item()
        x.nonzero()  # graphattn: allow data-dependent shape: shown

    data = json.loads(audit(program, torch.ones(3, 4)).to_json())
    assert (data["ok"], len(data["findings"]), len(data["allowed"])) == (False, 1, 1)
    fields = {"file", "line", "category", "operation", "reason", "fix", "source"}
    assert set(data["findings"][0]) == fields
    assert set(data["allowed"][0]) == fields | {"why"}
    assert json.loads(audit(lambda: None).to_json())["ok"]
