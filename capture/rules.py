"""What a program may not do while it is captured, and what to write instead."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


class Category(Enum):
    """Kinds of things that a graph cannot hold."""

    HOST_READ = "host read"
    DYNAMIC_SHAPE = "data-dependent shape"
    HOST_DATA = "tensor from Python data"
    COPY_TO_HOST = "device-to-host copy"
    COPY_TO_DEVICE = "host-to-device copy"
    STORAGE = "storage change"
    WAIT = "synchronisation"
    STREAM = "other stream"
    RANDOM = "random state"
    PINNED = "host memory"
    FROZEN = "frozen host value"
    MOVED = "other tensor"
    GRADIENT = "gradient"
    OPAQUE = "not recordable"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Rule:
    """Why something is refused (a phrase that follows the operation's name) and the fix."""

    category: Category
    reason: str
    fix: str

    def saying(self, *values: object) -> Rule:
        """With values put into its reason."""
        return replace(self, reason=self.reason.format(*values))


HOST_READ = Rule(
    Category.HOST_READ,
    "needs a device value on the host: a synchronisation that a graph cannot hold, and whose "
    "result it would freeze",
    "keep the value in a tensor: torch.where, masked_fill, index_select, or lengths read by "
    "the operation itself.",
)
ADDRESS = Rule(
    Category.HOST_READ,
    "takes an address or a storage on the host: work done through it is not recorded",
    "wrap that work in a torch.library op with a true mutation schema.",
)
DYNAMIC_SHAPE = Rule(
    Category.DYNAMIC_SHAPE,
    "has an output whose shape depends on device values",
    "use a static upper bound: torch.where, masked_fill, nonzero_static(size=...), "
    "repeat_interleave(output_size=...).",
)
BOOLEAN_MASK = Rule(
    Category.DYNAMIC_SHAPE,
    "indexes with a boolean mask: the number of elements depends on device values",
    "use torch.where or masked_fill over the whole tensor.",
)
HOST_DATA = Rule(
    Category.HOST_DATA,
    "makes a tensor from Python data inside the program: its values would be frozen",
    "create the tensor before capture and copy_ into it between replays, or use torch.full, "
    "torch.zeros or torch.arange for constants.",
)
COPY_TO_HOST = Rule(
    Category.COPY_TO_HOST,
    "copies from the device to the host inside the program",
    "leave the value on the device, and copy it out after the replay.",
)
COPY_TO_DEVICE = Rule(
    Category.COPY_TO_DEVICE,
    "copies from the host to the device inside the program: a replay would read the host memory "
    "of the capture again",
    "copy into a device tensor before the replay.",
)
MIXED_DEVICES = Rule(
    Category.COPY_TO_DEVICE,
    "mixes a tensor on the host with tensors on the device",
    "create the tensor on the device: pass device=.",
)
STORAGE = Rule(
    Category.STORAGE,
    "changes or exchanges the storage of a tensor: a graph holds addresses",
    "allocate at the upper bound before capture and write in place with copy_.",
)
COPY_FROM_PINNED = Rule(
    Category.COPY_TO_DEVICE,
    "copies from pinned host memory inside the program: a replay reads that memory when it runs, "
    "whatever it holds by then, also when it was freed and handed on",
    "copy into a device tensor before the replay, from a ring of pinned buffers that events guard.",
)
PINNED = Rule(
    Category.PINNED,
    "pins host memory inside the program: its block is recycled when the tensor is gone, and a "
    "captured copy goes on using it",
    "pin buffers before capture and keep them.",
)
WAIT = Rule(
    Category.WAIT,
    "waits for the device on the host, or asks it: not allowed while a stream is captured",
    "wait after the replay, for an event recorded behind it.",
)
ALLOCATOR = Rule(
    Category.STORAGE,
    "returns device memory: not allowed while a stream is captured",
    "call it before capture.",
)
OTHER_STREAM = Rule(
    Category.STREAM,
    "leaves the stream that is captured: its work is lost unless it is forked and joined by "
    "events, and a step is then no straight line",
    "launch everything on the stream that is captured.",
)
GENERATOR = Rule(
    Category.RANDOM,
    "draws from a generator that the graph does not know: the same numbers in every replay",
    "use torch's default generator, or register_generator_state before capture.",
)
RANDOM_STATE = Rule(
    Category.RANDOM,
    "sets or reads a random state on the host: a replay does not do it again",
    "seed before capture, or make the seed a tensor that the operation reads.",
)
OTHER_VALUE = Rule(
    Category.FROZEN,
    "was given {0!r} in one run and {1!r} in the next: a replay goes on with the first",
    "put the value into a device tensor that is written before each replay.",
)
OTHER_SHAPE = Rule(
    Category.FROZEN,
    "was given a tensor of shape {0} in one run and {1} in the next: a replay keeps the first",
    "allocate at the upper bound and mark what is valid, or capture a graph for each size.",
)
OTHER_PATH = Rule(
    Category.FROZEN,
    "is not where the run before went: a replay goes the way of its capture",
    "compute both and choose with torch.where, or capture a graph for each way.",
)
OTHER_MEMORY = Rule(
    Category.MOVED,
    "was given another tensor than in the run before: a graph keeps the address of the first",
    "allocate once before capture, and write into it with copy_.",
)
GRADIENT = Rule(
    Category.GRADIENT,
    "has an output that requires grad: a graph replays forward work only",
    "remove torch.enable_grad() from the program, or detach.",
)
CONTROL_FLOW = Rule(
    Category.OPAQUE,
    "is a higher-order operator, which cannot be recorded as one operation",
    "compute both sides and choose with torch.where, or wrap it in a torch.library op.",
)
COLLECTIVE = Rule(
    Category.OPAQUE,
    "is a raw collective, whose schema does not say what it writes",
    "wrap the collective in a torch.library op with a true mutation schema.",
)
OPAQUE_RESULT = Rule(
    Category.OPAQUE,
    "makes a tensor that is not plain strided memory",
    "make it before capture and pass it in.",
)
LAZY_BITS = Rule(
    Category.OPAQUE,
    "meets a tensor with a lazy conjugate or negation",
    "call resolve_conj() or resolve_neg() before.",
)


def _packets(*names: str) -> frozenset[Any]:
    return frozenset(getattr(aten, name) for name in names if hasattr(aten, name))


_HOST_READS = _packets("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose")
_DYNAMIC = _packets(
    "nonzero",
    "nonzero_numpy",
    "argwhere",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "unique_dim_consecutive",
    "bincount",
    "histogram",
    "combinations",
)
_HOST_DATA = _packets("lift_fresh", "lift")
_STORAGE = _packets("resize_", "resize_as_", "set_", "_resize_output_")
_INDEXING = _packets(
    "index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"
)
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})


def rule_for_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rule | None:
    """The rule that an operation breaks as it reaches the dispatcher, or None."""
    if not isinstance(func, torch._ops.OpOverload):
        return CONTROL_FLOW
    packet = func.overloadpacket
    if packet in _HOST_READS:
        return HOST_READ
    if packet in _DYNAMIC or _is_dynamic_overload(func, args, kwargs):
        return DYNAMIC_SHAPE
    if packet in _HOST_DATA:
        return HOST_DATA
    if packet in _STORAGE:
        return STORAGE
    if packet in _INDEXING and _has_mask(args[1]):
        return BOOLEAN_MASK
    if func.namespace in _COLLECTIVES:
        return COLLECTIVE
    return None


def _is_dynamic_overload(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func is aten.where.default:
        return True
    if func.overloadpacket is aten.repeat_interleave:
        return func is not aten.repeat_interleave.self_int and kwargs.get("output_size") is None
    return func is aten.tensor_split.tensor_indices_or_sections


def _has_mask(indices: Any) -> bool:
    return any(
        isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices
    )


# Python entry points that read values or addresses without an operation at the dispatcher.
FUNCTION_RULES: dict[Any, Rule] = {
    Tensor.tolist: HOST_READ,
    Tensor.numpy: HOST_READ,
    Tensor.__array__: HOST_READ,
    Tensor.__repr__: HOST_READ,
    Tensor.__format__: HOST_READ,
    Tensor.__dlpack__: ADDRESS,
    Tensor.data_ptr: ADDRESS,
    Tensor.untyped_storage: ADDRESS,
    Tensor.storage: ADDRESS,
    Tensor.__deepcopy__: STORAGE,
    Tensor.__reduce_ex__: ADDRESS,
    Tensor.data.__set__: STORAGE,  # type: ignore[attr-defined]
    Tensor.backward: GRADIENT,
    Tensor.pin_memory: PINNED,
}


def rule_for_function(func: Any, args: tuple[Any, ...]) -> Rule | None:
    """The rule that a torch function breaks before it reaches the dispatcher, or None."""
    rule = FUNCTION_RULES.get(func)
    if rule is None and func in _SPLITS and len(args) > 1 and isinstance(args[1], Tensor):
        return HOST_READ
    return rule


_SPLITS = frozenset({torch.tensor_split, Tensor.tensor_split})
