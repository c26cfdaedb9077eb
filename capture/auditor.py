"""The two modes under which a program is audited, and what they collect."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from .arguments import leaves, mapped
from .compiled import plain
from .cuda_calls import stand_ins
from .finding import Finding
from .plausible import function_result, op_result
from .rules import (
    COPY_FROM_PINNED,
    COPY_TO_DEVICE,
    COPY_TO_HOST,
    GENERATOR,
    HOST_DATA,
    HOST_READ,
    MIXED_DEVICES,
    PINNED,
    STORAGE,
    Category,
    Rule,
    rule_for_function,
    rule_for_op,
)
from .source import Place, is_library, user_place
from .storages import Storages, has_storage, tensors_in
from .trace import Call, Tracer

aten = torch.ops.aten
MAX_READS = 300  # of one line: a loop that ends on a device value does not end here


class _Stop(BaseException):
    """Ends a run that cannot go on with plausible values."""


class Auditor:
    """Collects findings while a program runs under its two modes, as often as it is run."""

    def __init__(self, device: torch.device) -> None:
        self.findings: dict[tuple[str, int, str], Finding] = {}
        self.num_ops = 0  # of the first run
        self.setitems = 0
        self.faking = False
        self.tracer = Tracer(Storages())
        self.pinned: list[Tensor] = []
        self._storages = Storages()
        self._reads: Counter[Place] = Counter()
        self._device = device
        self._bases: dict[int, Tensor] = {}  # by the real storage: its fake
        self._fakes: dict[Any, Tensor] = {}  # by storage and layout
        self._held: list[Tensor] = []  # keeps the keys of both unique

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Call] | None:
        """Run it; its calls, or None when it broke off."""
        self.tracer = Tracer(self._storages)
        self._fakes.clear()  # a program may have resized them
        self._reads.clear()
        try:
            with plain(), stand_ins(self.report), _FunctionAudit(self), _OpAudit(self):
                fn(*args)
        except _Stop:
            return None
        except Exception as error:
            self._report_failure(error)
            return None
        finally:
            self.num_ops = self.num_ops or len(self.tracer.calls)
        return self.tracer.calls

    def report(self, operation: str, rule: Rule, place: Place | None = None) -> None:
        """Add a finding, once per line and category."""
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
            base = self._bases.get(storage._cdata)
            if base is None:
                base = torch.empty(storage.nbytes(), dtype=torch.uint8, device=self._device)
                self._bases[storage._cdata] = base
                self._held.append(tensor)
            whole = base[: storage.nbytes() // tensor.itemsize * tensor.itemsize]
            self._fakes[key] = whole.view(tensor.dtype).as_strided(*layout[1:])
            self.faking = False
        return self._fakes[key]


class _FunctionAudit(TorchFunctionMode):
    """Sees attributes such as `device`, and reads that never reach the dispatcher."""

    def __init__(self, auditor: Auditor) -> None:
        super().__init__()
        self._auditor = auditor

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        auditor = self._auditor
        args, kwargs = auditor.faked((args, kwargs or {}))
        rule = rule_for_function(func, args)
        if rule is not None and rule is not STORAGE and not _harmless(func):
            if rule is not HOST_READ or args[0].is_cuda:
                auditor.report(resolve_name(func) or str(func), rule)
            if rule is PINNED:
                auditor.pinned.append(args[0])
            return function_result(func, args[0])
        if func is not Tensor.__setitem__:
            output = func(*args, **kwargs)
            if kwargs.get("pin_memory"):
                auditor.report(resolve_name(func) or str(func), PINNED)
                auditor.pinned.append(output)
            return output
        auditor.setitems += 1
        try:
            return func(*args, **kwargs)
        finally:
            auditor.setitems -= 1


def _harmless(func: Any) -> bool:
    """Addresses of whole storages: torch itself asks for them, and fake ones answer."""
    return func in (Tensor.untyped_storage, Tensor.storage, Tensor.__reduce_ex__)


class _OpAudit(TorchDispatchMode):
    """Sees every operation on its way to the fake device."""

    supports_higher_order_operators = True

    def __init__(self, auditor: Auditor) -> None:
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
                constant = func(*args, **kwargs)
                auditor.tracer.after(set(), constant)
                return constant
            args, kwargs = auditor.faked((args, kwargs))
            if rule is not None and any(tensor.is_cuda for tensor in tensors_in((args, kwargs))):
                auditor.report(str(func), rule)
            if any(isinstance(leaf, torch.Generator) for leaf in leaves((args, kwargs))):
                auditor.report(str(func), GENERATOR)
                args, kwargs = mapped(torch.Generator, lambda _: None, (args, kwargs))
            given = auditor.tracer.before(func, args, kwargs)
            output = self._run(func, args, kwargs)
            auditor.tracer.after(given, output)
            return output

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        auditor = self._auditor
        shape = kwargs["out"].shape if isinstance(kwargs.get("out"), Tensor) else None
        try:
            output = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            auditor.count_read()
            return op_result(func, args, kwargs)
        except RuntimeError as error:
            if not _mixes_devices(error, args, kwargs):
                raise
            auditor.report(str(func), MIXED_DEVICES)
            return func(*_moved(args), **_moved(kwargs))
        if shape is not None and kwargs["out"].shape != shape:
            auditor.report(str(func), STORAGE)
        self._check_copy(func, args, output)
        return output

    def _check_copy(self, func: Any, args: tuple[Any, ...], output: Any) -> None:
        auditor = self._auditor
        if func.overloadpacket is aten._to_copy:
            source, target = args[0], output
        elif func.overloadpacket is aten.copy_:
            target, source = args[0], args[1]
            if auditor.setitems and source.dim() == 0:
                return  # x[i] = 3.0 is a fill
        else:
            return
        if source.is_cuda and not target.is_cuda:
            auditor.report(str(func), COPY_TO_HOST)
        elif target.is_cuda and not source.is_cuda:
            pinned = any(source is tensor for tensor in auditor.pinned)
            auditor.report(str(func), COPY_FROM_PINNED if pinned else COPY_TO_DEVICE)


def _mixes_devices(error: RuntimeError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    devices = {tensor.device.type for tensor in tensors_in((args, kwargs)) if tensor.dim() > 0}
    return "device" in str(error).lower() and len(devices) > 1


def _moved(tree: Any) -> Any:
    """`tree` with its host tensors on the device, to go on after a mix of both."""
    return mapped(
        Tensor,
        lambda t: t if t.is_cuda or t.dim() == 0 else torch.empty_like(t, device="cuda"),
        tree,
    )
