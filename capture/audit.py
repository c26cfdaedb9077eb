"""Find what a CUDA graph cannot hold, without a GPU.

The program runs once on a fake CUDA device: shapes and devices are real, values are not. Real
tensors that it meets, of whatever device, become fake CUDA tensors on the fly. Where a value is
needed on the host, a plausible one is handed back and the program goes on, so that one run lists
everything.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from .arguments import mapped
from .compiled import plain
from .errors import CaptureError
from .plausible import function_result, op_result
from .rules import (
    COPY_TO_DEVICE,
    COPY_TO_HOST,
    HOST_DATA,
    HOST_READ,
    MIXED_DEVICES,
    STORAGE,
    Category,
    Rule,
    rule_for_function,
    rule_for_op,
)
from .source import Place, is_library, user_place
from .storages import has_storage, tensors_in

aten = torch.ops.aten
MAX_READS = 300  # of one line: a loop that ends on a device value does not end here


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a CUDA graph cannot hold, at a line of the caller's code."""

    category: str
    operation: str
    file: str
    line: int
    source: str
    reason: str
    fix: str

    def __str__(self) -> str:
        return (
            f"{self.file}:{self.line}: {self.category}: {self.source}\n"
            f"    {self.operation} {self.reason}\n    fix: {self.fix}"
        )


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Verdict on a program: `findings` in the order of their first occurrence, `num_ops` run."""

    findings: tuple[Finding, ...]
    num_ops: int

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __str__(self) -> str:
        if self.ok:
            return f"audit: nothing that a CUDA graph cannot hold in {self.num_ops} operations"
        lines = "\n".join(str(finding) for finding in self.findings)
        return f"audit: {len(self.findings)} findings in {self.num_ops} operations\n{lines}"


def audit(fn: Callable[..., Any], *args: Any, device: str = "cuda") -> AuditReport:
    """Run `fn(*args)` on a fake `device` and report all that a CUDA graph cannot hold.

    Host reads, data-dependent shapes, copies between host and device, tensors made from Python
    data. Real tensors among `args`, in modules and in closures are taken for device tensors;
    nothing of theirs is read or written. Inside `fake_cuda()` the program may also hold fake
    tensors of that mode. Raises `CaptureError` on a CPU-only build of torch.
    """
    fake = _require_fake_mode(device)
    auditor = _Auditor(torch.device(device), fake)
    entered: AbstractContextManager[Any] = nullcontext() if detect_fake_mode() else fake
    with torch.inference_mode(False), torch.no_grad(), entered, torch.device("cpu"):
        auditor.run(fn, args)
    return AuditReport(tuple(auditor.findings.values()), auditor.num_ops)


@contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    """A fake CUDA device to build models and buffers on: no memory, no values, no driver.

    Tensors are made on it unless they name another device. `audit` uses the device that is
    active. Raises `CaptureError` on a CPU-only build of torch.
    """
    with _require_fake_mode("cuda") as mode, torch.device("cuda"):
        yield mode


def _require_fake_mode(device: str) -> FakeTensorMode:
    if torch.device(device).type != "cuda":
        raise CaptureError(f"device: wanted a CUDA device, got {device!r}.")
    if not torch.backends.cuda.is_built():
        raise CaptureError(
            f"torch {torch.__version__} is built without CUDA and cannot fake its device. Install "
            "a CUDA build of torch; no GPU and no driver are needed."
        )
    return detect_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True)


class _Stop(BaseException):
    """Ends a run that cannot go on with plausible values."""


class _Auditor:
    """Collects findings while the program runs under its two modes."""

    def __init__(self, device: torch.device, fake: FakeTensorMode) -> None:
        self.findings: dict[tuple[str, int, str], Finding] = {}
        self.num_ops = 0
        self.setitems = 0
        self.faking = False
        self._reads: Counter[Place] = Counter()
        self._device = device
        self._fakes: dict[Any, Tensor] = {}
        self._held: list[Tensor] = []  # keeps the keys of `_fakes` unique

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            with plain(), _FunctionAudit(self), _OpAudit(self):
                fn(*args)
        except _Stop:
            pass
        except Exception as error:
            self._report_failure(error)

    def report(self, operation: str, rule: Rule, place: Place | None = None) -> None:
        place = place or user_place()
        key = (place.file, place.line, rule.category.value)
        made_here = (place.file, place.line, Category.HOST_DATA.value)
        if key in self.findings or (
            rule.category is Category.COPY_TO_DEVICE and made_here in self.findings
        ):
            return
        self.findings[key] = Finding(
            category=rule.category.value,
            operation=operation,
            file=place.file,
            line=place.line,
            source=place.source,
            reason=rule.reason,
            fix=rule.fix,
        )

    def count_read(self) -> None:
        """Stop when one line reads again and again: it waits for a value that never comes."""
        place = user_place()
        self._reads[place] += 1
        if self._reads[place] > MAX_READS:
            raise _Stop

    def _report_failure(self, error: Exception) -> None:
        frames = [
            f for f in traceback.extract_tb(error.__traceback__) if not is_library(f.filename)
        ]
        place = (
            Place(frames[-1].filename, frames[-1].lineno or 0, frames[-1].name)
            if frames
            else user_place()
        )
        reason = f"ended the audit early with {type(error).__name__}: {error}"
        fix = "mend the findings before this one, then audit again."
        self.report("the program", Rule(Category.FAILED, reason, fix), place)

    def faked(self, tree: Any) -> Any:
        """`tree` with its real tensors replaced."""
        return mapped(Tensor, self._fake, tree)

    def _fake(self, tensor: Tensor) -> Tensor:
        """The fake device tensor of a real one; tensors that share memory share it here too."""
        if isinstance(tensor, FakeTensor) or not has_storage(tensor):
            return tensor
        storage = tensor.untyped_storage()
        layout = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        key = (storage._cdata, *layout)
        if key not in self._fakes:
            self.faking = True
            base = self._fakes.get(storage._cdata)
            if base is None:
                base = torch.empty(storage.nbytes(), dtype=torch.uint8, device=self._device)
                self._fakes[storage._cdata] = base
                self._held.append(tensor)
            whole = base[: storage.nbytes() // tensor.itemsize * tensor.itemsize]
            self._fakes[key] = whole.view(tensor.dtype).as_strided(*layout[1:])
            self.faking = False
        return self._fakes[key]


class _FunctionAudit(TorchFunctionMode):
    """Sees attributes such as `device`, and reads that never reach the dispatcher."""

    def __init__(self, auditor: _Auditor) -> None:
        super().__init__()
        self._auditor = auditor

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = self._auditor.faked((args, kwargs or {}))
        rule = rule_for_function(func, args)
        if rule is not None and rule is not STORAGE and not _harmless(func):
            if rule is not HOST_READ or args[0].is_cuda:
                self._auditor.report(resolve_name(func) or str(func), rule)
            return function_result(func, args[0])
        if func is not Tensor.__setitem__:
            return func(*args, **kwargs)
        self._auditor.setitems += 1
        try:
            return func(*args, **kwargs)
        finally:
            self._auditor.setitems -= 1


def _harmless(func: Any) -> bool:
    """Addresses of whole storages: torch itself asks for them, and fake ones answer."""
    return func in (Tensor.untyped_storage, Tensor.storage, Tensor.__reduce_ex__)


class _OpAudit(TorchDispatchMode):
    """Sees every operation on its way to the fake device."""

    supports_higher_order_operators = True

    def __init__(self, auditor: _Auditor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._auditor = auditor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        auditor = self._auditor
        if auditor.faking or func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            rule = rule_for_op(func, args, kwargs)
            if rule is HOST_DATA:
                if not auditor.setitems:
                    auditor.report(str(func), rule)
                return func(*args, **kwargs)
            args, kwargs = auditor.faked((args, kwargs))
            auditor.num_ops += 1
            if rule is not None and any(tensor.is_cuda for tensor in tensors_in((args, kwargs))):
                auditor.report(str(func), rule)
            try:
                output = func(*args, **kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException):
                auditor.count_read()
                return op_result(func, args, kwargs)
            except RuntimeError as error:
                if not _mixes_devices(error, args, kwargs):
                    raise
                auditor.report(str(func), MIXED_DEVICES)
                return func(*_moved(args, auditor), **_moved(kwargs, auditor))
            self._check_copy(func, args, output)
            return output

    def _check_copy(self, func: Any, args: tuple[Any, ...], output: Any) -> None:
        if func.overloadpacket is aten._to_copy:
            source, target = args[0], output
        elif func.overloadpacket is aten.copy_:
            target, source = args[0], args[1]
            if self._auditor.setitems and source.dim() == 0:
                return  # x[i] = 3.0 is a fill
        else:
            return
        if source.is_cuda and not target.is_cuda:
            self._auditor.report(str(func), COPY_TO_HOST)
        elif target.is_cuda and not source.is_cuda:
            self._auditor.report(str(func), COPY_TO_DEVICE)


def _mixes_devices(error: RuntimeError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    devices = {tensor.device.type for tensor in tensors_in((args, kwargs)) if tensor.dim() > 0}
    return "device" in str(error).lower() and len(devices) > 1


def _moved(tree: Any, auditor: _Auditor) -> Any:
    """`tree` with its host tensors on the device, to go on after a mix of both."""
    return mapped(
        Tensor,
        lambda t: t if t.is_cuda or t.dim() == 0 else torch.empty_like(t, device="cuda"),
        tree,
    )
