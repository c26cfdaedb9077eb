"""What the host backend refuses, with the caller's line, the reason and the fix."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graphattn._capture.errors import CaptureError, RefusedError
from graphattn._capture.graph import GraphState
from graphattn._capture.host import HostGraph

X = torch.tensor([1.0, -2.0, 3.0])
IDS = torch.tensor([0, 2, 1])
STATE = torch.zeros(3)
WEIGHT = torch.nn.Parameter(torch.ones(3))


def branch() -> None:
    if X.sum() > 0:
        STATE.add_(1)


def loop() -> None:
    for _ in range(IDS[0]):
        STATE.add_(1)


def with_grad() -> Tensor:
    with torch.enable_grad():
        return WEIGHT * 2


HOST_READ = "needs a device value on the host"
SHAPE = "has an output whose shape depends on device values"
MASK = "indexes with a boolean mask"
DATA = "makes a tensor from Python data"
STORAGE = "changes or exchanges the storage"
ADDRESS = "takes an address"

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "item": (lambda: X.sum().item(), HOST_READ),
    "int": (lambda: int(IDS[0]), HOST_READ),
    "float": (lambda: float(X[0]), HOST_READ),
    "if": (branch, HOST_READ),
    "range": (loop, HOST_READ),
    "list index": (lambda: [1, 2, 3][IDS[0]], HOST_READ),
    "slice bound": (lambda: X[: IDS[2]], HOST_READ),
    "tolist": (lambda: X.tolist(), HOST_READ),
    "numpy": (lambda: X.numpy(), HOST_READ),
    "asarray": (lambda: np.asarray(X), HOST_READ),
    "print": (lambda: f"{X}", HOST_READ),
    "repr": (lambda: repr(X), HOST_READ),
    "equal": (lambda: torch.equal(X, X), HOST_READ),
    "allclose": (lambda: torch.allclose(X, X), HOST_READ),
    "full of a tensor": (lambda: torch.full((2,), X[0]), HOST_READ),
    "tensor_split": (lambda: torch.tensor_split(X, IDS), HOST_READ),
    "one_hot of unknown classes": (lambda: F.one_hot(IDS), HOST_READ),
    "data_ptr": (lambda: X.data_ptr(), ADDRESS),
    "storage": (lambda: X.untyped_storage(), ADDRESS),
    "dlpack": (lambda: torch.from_dlpack(X), ADDRESS),
    "nonzero": (lambda: X.nonzero(), SHAPE),
    "where": (lambda: torch.where(X > 0), SHAPE),
    "masked_select": (lambda: X.masked_select(X > 0), SHAPE),
    "unique": (lambda: torch.unique(X), SHAPE),
    "bincount": (lambda: IDS.bincount(), SHAPE),
    "repeat_interleave": (lambda: X.repeat_interleave(IDS), SHAPE),
    "mask": (lambda: X[X > 0], MASK),
    "mask assignment": (lambda: STATE.__setitem__(X > 0, 1.0), MASK),
    "tensor": (lambda: torch.tensor([1.0, 2.0]), DATA),
    "as_tensor": (lambda: torch.as_tensor([1.0]), DATA),
    "from_numpy": (lambda: torch.from_numpy(np.ones(3)), DATA),
    "new_tensor": (lambda: X.new_tensor([1.0]), DATA),
    "resize": (lambda: torch.empty(0).resize_(3), STORAGE),
    "set_": (lambda: torch.empty(0).set_(X), STORAGE),
    "data": (lambda: setattr(WEIGHT, "data", X), STORAGE),
    "deepcopy": (lambda: copy.deepcopy(X), STORAGE),
    "grad": (with_grad, "requires grad"),
    "cond": (
        lambda: torch.ops.higher_order.cond(X[0] > 0, lambda: X + 1, lambda: X - 1, ()),
        "is a higher-order operator",
    ),
    "sparse": (lambda: X.to_sparse(), "has an output whose shape|not plain strided memory"),
    "conj": (lambda: torch.polar(X, X).conj() * 1, "lazy conjugate"),
}
MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize(
    ("name", "mode"),
    # inside inference mode nothing can require grad
    [(n, m) for n in REFUSED for m in MODES if (n, m) != ("grad", "inference")],
)
def test_refused_with_place_reason_and_fix(name: str, mode: str) -> None:
    program, reason = REFUSED[name]
    before = STATE.clone(), torch.get_rng_state()

    def step() -> None:
        STATE.add_(torch.rand(3))
        program()

    graph = HostGraph("refused")
    with MODES[mode](), pytest.raises(RefusedError, match=reason) as caught:
        graph.capture(step)
    place = caught.value.place
    lines, first = inspect.getsourcelines(program)
    assert place.file == __file__
    assert first <= place.line < first + len(lines)
    assert place.source
    assert f"{place.file}:{place.line} in " in str(caught.value)
    assert f"fix: {caught.value.fix}" in str(caught.value)
    assert graph.state is GraphState.CLOSED
    assert torch.equal(before[0], STATE)
    assert torch.equal(before[1], torch.get_rng_state())


def test_an_error_of_the_program_passes_unchanged_and_restores() -> None:
    def program() -> None:
        STATE.add_(1)
        raise KeyError("mine")

    graph = HostGraph("fails")
    with pytest.raises(KeyError, match="mine"):
        graph.capture(program)
    assert STATE.tolist() == [0.0] * 3
    assert graph.state is GraphState.CLOSED
    assert (torch.zeros(1) + 1).item() == 1.0  # no mode is left behind


def test_raw_collectives_are_refused() -> None:
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(CaptureError, match="is a raw collective"):
            HostGraph("collective").capture(lambda: dist.all_reduce(STATE))
    finally:
        dist.destroy_process_group()


def test_scalar_assignment_and_one_hot_are_fills_on_cuda_and_allowed() -> None:
    def program() -> Tensor:
        STATE[1] = 3.0
        return F.one_hot(IDS, 4)

    graph = HostGraph("allowed")
    hot = graph.capture(program)
    graph.replay()
    assert STATE.tolist() == [0.0, 3.0, 0.0]
    STATE.zero_()
    assert hot.argmax(1).tolist() == [0, 2, 1]
