"""The audit names everything that a CUDA graph cannot hold, in one run, without a GPU."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graphattn._capture import audit as audit_module
from graphattn._capture.audit import audit, fake_cuda
from graphattn._capture.errors import CaptureError

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="needs a CUDA build of torch (no GPU, no driver)"
)

LINEAR = torch.nn.Linear(4, 4)
CACHE = torch.zeros(6, 4)
IDS = torch.tensor([0, 2, 1])
FLAG = torch.tensor(True)


def branch(x: Tensor) -> None:
    if x.sum() > 0:
        x.add_(1)


def until_done(x: Tensor) -> None:
    done = False
    while not done:
        x.add_(1)
        done = bool(x.sum() > 10)


HOST_READ, SHAPE = "host read", "data-dependent shape"
TO_HOST, TO_DEVICE, DATA = "device-to-host copy", "host-to-device copy", "tensor from Python data"

BAD: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "item": (lambda x: x.sum().item(), HOST_READ),
    "max item": (lambda x: x.max().item(), HOST_READ),
    "int": (lambda x: int(x[0, 0]), HOST_READ),
    "if": (branch, HOST_READ),
    "while": (until_done, HOST_READ),
    "tolist": (lambda x: x.tolist(), HOST_READ),
    "numpy": (lambda x: x.numpy(), HOST_READ),
    "asarray": (lambda x: np.asarray(x), HOST_READ),
    "print": (lambda x: f"{x}", HOST_READ),
    "equal": (lambda x: torch.equal(x, x), HOST_READ),
    "closure": (lambda x: range(IDS[0]), HOST_READ),
    "module": (lambda x: LINEAR(x).argmax().item(), HOST_READ),
    "tensor_split": (lambda x: torch.tensor_split(x, IDS), HOST_READ),
    "slice": (lambda x: x[: IDS[2]], HOST_READ),
    "nonzero": (lambda x: x.nonzero(), SHAPE),
    "where": (lambda x: torch.where(x > 0)[0] + 1, SHAPE),
    "mask": (lambda x: x[x > 0].sum(), SHAPE),
    "row mask": (lambda x: x[x.any(1)], SHAPE),
    "mask assignment": (lambda x: x.__setitem__(x > 0, 1.0), SHAPE),
    "masked_select": (lambda x: x.masked_select(x > 0), SHAPE),
    "unique": (lambda x: torch.unique(x, return_inverse=True), SHAPE),
    "unique rows": (lambda x: torch.unique(x, dim=0), SHAPE),
    "bincount": (lambda x: IDS.bincount(), SHAPE),
    "repeat_interleave": (lambda x: x[:3].repeat_interleave(IDS, 0), SHAPE),
    "cpu": (lambda x: x.cpu(), TO_HOST),
    "to cpu": (lambda x: x.to("cpu", non_blocking=True) + 1, TO_HOST),
    "cpu numpy": (lambda x: x.cpu().numpy().sum(), TO_HOST),
    "cpu item": (lambda x: x.cpu().sum().item(), TO_HOST),
    "copy into host tensor": (lambda x: torch.zeros(3, 4).copy_(x), TO_HOST),
    "to device": (lambda x: torch.zeros(3).to(x.device), TO_DEVICE),
    "copy from host tensor": (lambda x: x.copy_(torch.zeros(3, 4)), TO_DEVICE),
    "mixed": (lambda x: x + torch.zeros(4), TO_DEVICE),
    "tensor": (lambda x: torch.tensor([1, 2]), DATA),
    "tensor on device": (lambda x: torch.tensor([1.0], device=x.device) + x, DATA),
    "new_tensor": (lambda x: x.new_tensor([1.0]), DATA),
    "from_numpy": (lambda x: torch.from_numpy(np.ones(4)).to(x.device), DATA),
    "resize": (lambda x: x.resize_(20), "storage change"),
}


@pytest.mark.parametrize("name", BAD)
def test_found_with_category_and_line(name: str) -> None:
    program, category = BAD[name]
    report = audit(program, torch.ones(3, 4))
    assert [finding.category for finding in report.findings] == [category]
    (finding,) = report.findings
    lines, first = inspect.getsourcelines(program)
    assert finding.file == __file__
    assert first <= finding.line < first + len(lines)
    assert finding.source in (line.strip() for line in lines)
    assert f"{finding.file}:{finding.line}: {category}: " in str(report)
    assert finding.reason in str(report)
    assert f"fix: {finding.fix}" in str(report)
    assert not report.ok


def test_everything_is_found_in_one_run() -> None:
    def program(x: Tensor) -> Tensor:
        for name in ("item", "mask", "cpu", "mixed", "tensor on device", "unique rows", "while"):
            BAD[name][0](x)
        return x

    report = audit(program, torch.ones(3, 4))
    assert [finding.category for finding in report.findings] == [
        HOST_READ, SHAPE, TO_HOST, TO_DEVICE, DATA, SHAPE, HOST_READ,
    ]  # fmt: skip


def aliased(x: Tensor) -> Tensor:
    """A buffer of another type over the same memory."""
    CACHE.view(torch.int32)[0].zero_()
    return CACHE[1:3] + x[:2]


CLEAN: dict[str, Callable[[Tensor], Any]] = {
    "module": lambda x: LINEAR(x) @ LINEAR.weight,
    "cache": lambda x: CACHE.index_copy_(0, IDS, x),
    "device of an input": lambda x: torch.arange(4, device=x.device) + x,
    "device of a weight": lambda x: torch.zeros(4, device=next(LINEAR.parameters()).device) + x,
    "like": lambda x: torch.zeros_like(x) + x.new_zeros(4) + torch.full_like(x, 2.0),
    "scalar assignment": lambda x: x.__setitem__((0, 1), 3.0),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "one_hot": lambda x: F.one_hot(IDS, 5),
    "topk": lambda x: x.softmax(-1).topk(2).indices.to(torch.int32),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "shapes": lambda x: x.view(x.shape[0] * x.shape[1]).reshape(4, -1).float(),
    "aliased": aliased,
    "random": lambda x: torch.rand_like(x) + F.dropout(x),
    "rope": lambda x: torch.cat((-x[:, 2:], x[:, :2]), -1) * (x * 2).cos(),
    "branch on python": lambda x: x + 1 if x.dim() == 2 and x.is_cuda else x.item(),
}


@pytest.mark.parametrize("name", CLEAN)
def test_clean_programs_pass_and_touch_nothing(name: str) -> None:
    x = torch.ones(3, 4)
    before = [t.clone() for t in (x, CACHE, IDS, LINEAR.weight)]
    report = audit(CLEAN[name], x)
    assert report.ok, str(report)
    assert report.num_ops > 0
    assert "nothing that a CUDA graph cannot hold" in str(report)
    assert all(
        torch.equal(a, b) for a, b in zip(before, (x, CACHE, IDS, LINEAR.weight), strict=True)
    )


def test_inference_mode_sees_the_same() -> None:
    with torch.inference_mode():
        assert audit(lambda x: F.linear(x, x).sum(), torch.ones(3, 4)).ok
        assert audit(lambda x: x.sum().item(), torch.ones(3, 4)).findings[0].category == HOST_READ


def test_custom_ops_with_a_fake_implementation_are_one_operation() -> None:
    library = torch.library.Library("graphattn_test_audit", "DEF")
    library.define("fill(Tensor x, Tensor(a!) out) -> ()")

    def fill(x: Tensor, out: Tensor) -> None:
        raise AssertionError("an audit computes nothing")

    library.impl("fill", fill, "CUDA")
    library.impl("fill", fill, "CPU")
    torch.library.register_fake("graphattn_test_audit::fill", lambda x, out: None, lib=library)
    report = audit(lambda x: torch.ops.graphattn_test_audit.fill(x, CACHE), torch.ones(3, 4))
    assert report.ok
    assert report.num_ops == 1


def test_an_exception_of_the_program_is_the_last_finding() -> None:
    def program(x: Tensor) -> None:
        x.sum().item()
        x.view(5, 5)

    report = audit(program, torch.ones(3, 4))
    assert [finding.category for finding in report.findings] == [HOST_READ, "failed"]
    assert report.findings[-1].source == "x.view(5, 5)"
    assert "ended the audit early with RuntimeError" in report.findings[-1].reason


def test_a_loop_on_a_device_value_ends() -> None:
    def program(x: Tensor) -> None:
        while x.sum() > 0:
            x.sub_(1)

    report = audit(program, torch.ones(3, 4))
    assert [finding.source for finding in report.findings] == ["while x.sum() > 0:"]


def test_built_on_the_fake_device() -> None:
    with fake_cuda() as mode:
        model = torch.nn.Linear(4, 4, bias=False)
        x = torch.ones(2, 4)
        assert model.weight.device.type == x.device.type == "cuda"
        assert audit(lambda: model(x)).ok
        report = audit(lambda: model(x).sum().item() + (x + torch.zeros(4)).numel())
        assert [finding.category for finding in report.findings] == [HOST_READ, TO_DEVICE]
        assert x.fake_mode is mode


def test_wrong_device_and_cpu_only_builds_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CaptureError, match="device: wanted a CUDA device, got 'cpu'"):
        audit(lambda: None, device="cpu")
    monkeypatch.setattr(audit_module.torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(CaptureError, match="is built without CUDA"):
        audit(lambda: None)
    with pytest.raises(CaptureError, match="Install a CUDA build"), fake_cuda():
        pass


def test_a_transformers_model_with_attention_as_one_op() -> None:
    """The stock attention reads the mask on the host; with a mask of its own the model is clean."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=30,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    transformers.AttentionInterface.register(
        "audited", lambda module, q, k, v, mask, **kw: (q.mT, None)
    )
    transformers.AttentionMaskInterface.register("audited", lambda *args, **kwargs: None)
    config._attn_implementation = "audited"
    model = transformers.LlamaForCausalLM(config).eval()
    ids, positions = torch.zeros(1, 5, dtype=torch.int64), torch.arange(5)[None]
    ones = torch.ones(1, 5, dtype=torch.int64)

    def step() -> Any:
        return model(input_ids=ids, position_ids=positions, attention_mask=ones, use_cache=False)

    report = audit(step)
    assert report.ok, str(report)
    assert report.num_ops > 1000
    report = audit(lambda: step().logits.argmax().item())
    assert [finding.category for finding in report.findings] == [HOST_READ]
