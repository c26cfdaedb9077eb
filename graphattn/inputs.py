"""Host to device: the packed input block of a step and the prompts. The only writer to the device.

A step's block is filled in one entry of a pinned ring and copied to its fixed device address
before the graph is launched. The graph holds no host copy: a captured one would read pinned
memory when it executes, and the host, running ahead, would have overwritten it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graphattn.bounds import Bounds, ceil_div
from graphattn.stream import Marker, Stream, host_buffer

FLOATS = (  # fields of the block that hold fp32 bits
    "temperature",
    "top_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
PROMPT_CHUNK = 16384  # tokens of one entry of the prompt ring
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of a slot are chosen; see `request.SamplingParams`."""

    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A request takes a slot."""

    slot: int
    generation: int
    tokens: Sequence[int]  # the prompt, and what was emitted before a preemption
    given_len: int  # of them the prompt's
    context_len: int  # tokens whose KV is there already (a prefix hit)
    stop_len: int  # total length at which it ends
    stop_tokens: Sequence[int]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class PageUpdate:
    """page_table[slot, column] = page."""

    slot: int
    column: int
    page: int


@dataclass(slots=True)
class StepInputs:
    """What the host decided for one step; nothing in it depends on an unread device value."""

    rows: list[tuple[int, int]] = field(default_factory=list)  # (slot, query_len)
    admissions: list[Admission] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)  # slots
    page_updates: list[PageUpdate] = field(default_factory=list)
    mixed: bool = False  # some row is in prefill

    @property
    def tokens(self) -> int:
        """Token places of all rows."""
        return sum(query_len for _, query_len in self.rows)


def input_fields(bounds: Bounds) -> dict[str, tuple[int, ...]]:
    """Name and shape of every field of the block, in its order."""
    slots = (bounds.max_batch,)
    return {
        "slot_of_row": slots,
        "query_len": slots,
        "admit_generation": slots,
        "release": slots,
        "admit_prompt_len": slots,
        "admit_given_len": slots,
        "admit_context_len": slots,
        "admit_stop_len": slots,
        "admit_stop_tokens": (bounds.max_batch, bounds.max_stop_tokens),
        "page_updates": (bounds.max_page_updates, 3),
        "top_k": slots,
        "seed": (bounds.max_batch, 2),
    } | dict.fromkeys(FLOATS, slots)


def block_size(fields: Mapping[str, tuple[int, ...]]) -> int:
    """int32 values of a block with these fields."""
    return sum(int(np.prod(shape)) for shape in fields.values())


def block_views(block: Tensor, fields: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Each field as a view of the flat `block`."""
    views, start = {}, 0
    for name, shape in fields.items():
        size = int(np.prod(shape))
        views[name] = block[start : start + size].view(shape)
        start += size
    return views


class InputBlock:
    """The block at its fixed device address; `InputBlock.field_name` is a view, int32.

    Freshly made it describes an idle step: no rows, no admissions.
    """

    slot_of_row: Tensor  # [B]; -1 = padding row
    query_len: Tensor  # [B]
    admit_generation: Tensor  # [B], by slot; -1 = no admission
    release: Tensor  # [B], by slot
    admit_prompt_len: Tensor  # [B]
    admit_given_len: Tensor  # [B]
    admit_context_len: Tensor  # [B]
    admit_stop_len: Tensor  # [B]
    admit_stop_tokens: Tensor  # [B, N]; -1 = unused
    page_updates: Tensor  # [U, 3]: slot (-1 = unused), column, page
    temperature: Tensor  # [B] fp32, by slot, as all of the following
    top_k: Tensor  # [B]
    top_p: Tensor  # [B] fp32
    repetition_penalty: Tensor  # [B] fp32
    presence_penalty: Tensor  # [B] fp32
    frequency_penalty: Tensor  # [B] fp32
    seed: Tensor  # [B, 2]: low and high word

    def __init__(self, bounds: Bounds, device: torch.device) -> None:
        fields = input_fields(bounds)
        self.block = torch.zeros(block_size(fields), dtype=torch.int32, device=device)
        for name, view in block_views(self.block, fields).items():
            setattr(self, name, view.view(torch.float32) if name in FLOATS else view)
        for view in (self.slot_of_row, self.admit_generation, self.page_updates):
            view.fill_(-1)


class _Entry:
    """One host copy of the block, and the marker behind the last copy out of it."""

    def __init__(self, bounds: Bounds, size: int, device: torch.device) -> None:
        fields = input_fields(bounds)
        self.buffer = host_buffer(size, device)
        self.arrays: dict[str, Ints] = {
            name: view.numpy() for name, view in block_views(self.buffer, fields).items()
        }
        self.copied: Marker | None = None
        self.sampling: dict[int, Sampling] = {}  # by slot, set since its last use

    def fill(self, inputs: StepInputs) -> None:
        a, count = self.arrays, len(inputs.rows)
        if count:
            a["slot_of_row"][:count], a["query_len"][:count] = zip(*inputs.rows, strict=True)
        a["slot_of_row"][count:] = -1
        a["query_len"][count:] = 0
        for slot, sampling in self.sampling.items():
            self._set_sampling(slot, sampling)
        self.sampling.clear()
        a["release"].fill(0)
        if inputs.releases:
            a["release"][inputs.releases] = 1
        a["admit_generation"].fill(-1)
        for admission in inputs.admissions:
            self._admit(admission)
        updates = a["page_updates"]
        updates[len(inputs.page_updates) :].fill(-1)
        for i, update in enumerate(inputs.page_updates):
            updates[i] = update.slot, update.column, update.page

    def _set_sampling(self, slot: int, sampling: Sampling) -> None:
        for name in FLOATS:
            self.arrays[name].view(np.float32)[slot] = getattr(sampling, name)
        self.arrays["top_k"][slot] = min(sampling.top_k, 2**31 - 1)
        self.arrays["seed"][slot] = np.array([sampling.seed], dtype=np.uint64).view(np.int32)

    def _admit(self, admission: Admission) -> None:
        a, slot = self.arrays, admission.slot
        a["admit_generation"][slot] = admission.generation
        a["admit_prompt_len"][slot] = len(admission.tokens)
        a["admit_given_len"][slot] = admission.given_len
        a["admit_context_len"][slot] = admission.context_len
        a["admit_stop_len"][slot] = admission.stop_len
        a["admit_stop_tokens"][slot].fill(-1)
        a["admit_stop_tokens"][slot, : len(admission.stop_tokens)] = admission.stop_tokens


class InputRing:
    """Pinned blocks, one per step in flight and one more, in turn."""

    def __init__(self, bounds: Bounds, device: torch.device, *, steps_in_flight: int) -> None:
        sizes = self.sizes(bounds, steps_in_flight=steps_in_flight)
        self._entries = [_Entry(bounds, size, device) for size in sizes]
        self._next = 0

    @staticmethod
    def sizes(bounds: Bounds, *, steps_in_flight: int) -> list[int]:
        """int32 values of each buffer."""
        return [block_size(input_fields(bounds))] * (steps_in_flight + 1)

    def send(self, inputs: StepInputs, target: InputBlock, stream: Stream) -> None:
        """Stage `inputs` and enqueue their copy to `target`.

        Waits only if the ring's oldest copy has not ended, which cannot be while at most
        `steps_in_flight` steps are unread.
        """
        entry = self._entries[self._next]
        self._next = (self._next + 1) % len(self._entries)
        if entry.copied is not None:
            entry.copied.wait()
        for each in self._entries:
            each.sampling |= {a.slot: a.sampling for a in inputs.admissions}
        entry.fill(inputs)
        stream.copy(target.block, entry.buffer)
        entry.copied = stream.mark()


class PromptRing:
    """Pinned chunks through which whole prompts reach the device's token history."""

    def __init__(self, bounds: Bounds, device: torch.device, *, prompts_in_flight: int) -> None:
        sizes = self.sizes(bounds, prompts_in_flight=prompts_in_flight)
        self._chunk = sizes[0]
        self._buffers = [host_buffer(size, device) for size in sizes]
        self._copied: list[Marker | None] = [None] * len(sizes)
        self._next = 0

    @staticmethod
    def sizes(bounds: Bounds, *, prompts_in_flight: int) -> list[int]:
        """int32 values of each buffer, all the same."""
        chunk = min(PROMPT_CHUNK, bounds.max_seq_len)
        return [chunk] * max(prompts_in_flight, ceil_div(bounds.max_seq_len, chunk))

    def has_room(self, lengths: Sequence[int]) -> bool:
        """Whether prompts of these lengths can be sent without waiting for an earlier copy."""
        count = sum(ceil_div(length, self._chunk) for length in lengths)
        if count > len(self._buffers):
            return False
        ring = ((self._next + i) % len(self._buffers) for i in range(count))
        return all(m is None or m.done() for m in (self._copied[i] for i in ring))

    def send(self, tokens: Sequence[int], target: Tensor, stream: Stream) -> None:
        """Enqueue the copy of `tokens` to the front of `target` [max_seq_len] int32.

        Call `has_room` first: a chunk that is still being copied is waited for.
        """
        values = np.asarray(tokens, dtype=np.int32)
        for start in range(0, len(values), self._chunk):
            part = values[start : start + self._chunk]
            index = self._next
            self._next = (index + 1) % len(self._buffers)
            if (marker := self._copied[index]) is not None:
                marker.wait()
            source = self._buffers[index][: len(part)]
            source.numpy()[:] = part
            stream.copy(target[start : start + len(part)], source)
            self._copied[index] = stream.mark()
