"""Find what a CUDA graph cannot hold, without a GPU.

The program runs on a fake CUDA device: shapes and devices are real, values are not. Real tensors
that it meets, of whatever device, become fake CUDA tensors on the fly. Where a value is needed on
the host, a plausible one is handed back and the program goes on, so that one run lists everything.
It then runs once more: what differs between the two would be frozen in a graph.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode

from .auditor import Auditor
from .cuda_calls import a_device
from .errors import CaptureError
from .finding import Finding, allowance
from .trace import Call, differences


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Verdict on a program: `findings` in the order of their first occurrence, `num_ops` run.

    `allowed` are the findings whose line, or the one above it, says
    `# graphattn: allow CATEGORY: REASON`, each with that reason.
    """

    findings: tuple[Finding, ...]
    num_ops: int
    allowed: tuple[tuple[Finding, str], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was found that is not allowed."""
        return not self.findings

    def __str__(self) -> str:
        lines = [f"allowed: {finding.head} ({reason})" for finding, reason in self.allowed]
        if self.ok:
            verdict = f"audit: nothing that a CUDA graph cannot hold in {self.num_ops} operations"
            return "\n".join([verdict, *lines])
        verdict = f"audit: {len(self.findings)} findings in {self.num_ops} operations"
        return "\n".join([verdict, *map(str, self.findings), *lines])

    def to_json(self) -> str:
        """One object: `ok`, `num_ops`, `findings` with their fields, `allowed` with a `why` too."""
        allowed = [asdict(finding) | {"why": reason} for finding, reason in self.allowed]
        findings = [asdict(finding) for finding in self.findings]
        whole = {"ok": self.ok, "num_ops": self.num_ops, "findings": findings, "allowed": allowed}
        return json.dumps(whole, indent=2)


def audit(
    fn: Callable[..., Any],
    *args: Any,
    device: str = "cuda",
    advance: Callable[[], object] | None = None,
) -> AuditReport:
    """Run `fn(*args)` twice on a fake `device` and report all that a CUDA graph cannot hold.

    Host reads, data-dependent shapes, copies between host and device, tensors made from Python
    data, waits, other streams, random states; and what a graph would freeze: numbers, shapes,
    paths and tensors that are not the same in the second run. `advance` is called between the
    runs, to move on what a loop moves on between steps on the host.

    Real tensors among `args`, in modules and in closures are taken for device tensors; nothing of
    theirs is read or written. Inside `fake_cuda()` the program may also hold fake tensors of that
    mode. Raises `CaptureError` on a CPU-only build of torch.
    """
    fake = fake_mode(device)
    auditor = Auditor(torch.device(device))
    first = run_once(auditor, fake, fn, args)
    if first is not None:  # it ran to its end
        if advance is not None:
            advance()
        for operation, rule, place in differences(first, run_once(auditor, fake, fn, args) or []):
            auditor.report(operation, rule, place)
    return _report(auditor)


def run_once(
    auditor: Auditor, fake: FakeTensorMode, fn: Callable[..., Any], args: tuple[Any, ...] = ()
) -> list[Call] | None:
    """The calls of one run; None when it broke off, which the auditor's findings then say."""
    entered: AbstractContextManager[Any] = nullcontext() if detect_fake_mode() else fake
    with torch.inference_mode(False), torch.no_grad(), entered, torch.device("cpu"):
        return auditor.run(fn, args)


def _report(auditor: Auditor) -> AuditReport:
    found = [(finding, allowance(finding)) for finding in auditor.findings.values()]
    return AuditReport(
        findings=tuple(finding for finding, reason in found if reason is None),
        num_ops=auditor.num_ops,
        allowed=tuple((finding, reason) for finding, reason in found if reason is not None),
    )


@contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    """A fake CUDA device to build models and buffers on: no memory, no values, no driver. It says
    that it is of compute capability 9.0.

    Tensors are made on it unless they name another device. `audit` uses the device that is
    active. Raises `CaptureError` on a CPU-only build of torch.
    """
    with fake_mode("cuda") as mode, torch.device("cuda"), a_device():
        yield mode


def fake_mode(device: str) -> FakeTensorMode:
    """The mode that is active, or a new one; `CaptureError` on a CPU-only build of torch."""
    if torch.device(device).type != "cuda":
        raise CaptureError(f"device: wanted a CUDA device, got {device!r}.")
    if not torch.backends.cuda.is_built():
        raise CaptureError(
            f"torch {torch.__version__} is built without CUDA and cannot fake its device. Install "
            "a CUDA build of torch; no GPU and no driver are needed."
        )
    return detect_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True)
