"""Compile jobs of the kernels of a step but attention, each at its largest."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from graphattn.kernels.ops import COLDEST, IN_PROMPT
from tests.aot import Job

FP32 = {
    "temperature_ptr",
    "top_p_ptr",
    "repetition_penalty_ptr",
    "presence_penalty_ptr",
    "frequency_penalty_ptr",
    "logprob_ptr",
}
INT64 = {"input_ids_ptr", "positions_ptr", "kv_slot_ptr", "logits_token_ptr"}
SHARD = {"DCP_SIZE": 4, "DCP_RANK": 1, "INTERLEAVE": 16}
LISTS = {"MAX_SPLITS": 16, "PREFILL_BLOCK": 16, "ROWS": 1024}
HEADS = {"D": 128, "D_PADDED": 128, "BLOCK": 16}
ELEMENTS = ("out_ptr", "scaled_ptr", "message_ptr", "merged_ptr")
FLOATS = ("lse_ptr", "lses_ptr", "packed_lse_ptr", "sinks_ptr")


@dataclass(frozen=True)
class Kernel:
    """One kernel at its largest."""

    module: str
    name: str
    constants: Mapping[str, int | float | tuple[int, ...]]
    num_warps: int = 4
    fp_fusion: bool = True
    types: Mapping[str, str] = field(default_factory=dict)

    def job(self, arch: str) -> Job:
        function = getattr(importlib.import_module(f"graphattn.kernels.{self.module}"), self.name)
        pointers = [name for name in function.arg_names if name.endswith("_ptr")]
        types = {
            name: "*i64" if name in INT64 else "*fp32" if name in FP32 else "*i32"
            for name in pointers
        }
        return Job(
            self.module,
            self.name,
            arch,
            types | dict(self.types),
            self.constants,
            num_warps=self.num_warps,
            fp_fusion=self.fp_fusion,
        )


def partial_kernel(module: str, name: str, constants: Mapping[str, int]) -> Kernel:
    """A kernel over bf16 partial attention, with sinks."""
    function = getattr(importlib.import_module(f"graphattn.kernels.{module}"), name)
    types = dict.fromkeys(ELEMENTS, "*bf16") | dict.fromkeys(FLOATS, "*fp32")
    types = {pointer: types[pointer] for pointer in types if pointer in function.arg_names}
    return Kernel(module, name, {**HEADS, **constants}, types=types)


SHARES = {"HEADS": 64, "SLICES": 8}
MESSAGE = {"MESSAGE_ROW": 130, "LSE_ROW": 65}
MERGED = {"SINKS": 64, "RANKS": 8}

KERNELS = {
    "admit": Kernel("admit", "_admit_kernel", {"STOPS": 8, "STOPS_PADDED": 8, "BLOCK": 128}),
    "rows": Kernel(
        "rows_from_lengths",
        "_rows_kernel",
        {"MAX_DRAFTS": 3, "HAS_PREFILL": True, "ROWS": 1024},
    ),
    "scan": Kernel(
        "prepare",
        "_scan_kernel",
        {"WINDOWS": (0, 1024), "MAX_DRAFTS": 3, "ALIGN": 64, "CHUNK": 256} | SHARD | LISTS,
    ),
    "place": Kernel(
        "prepare",
        "_place_kernel",
        {"WINDOWS": (0, 1024), "MAX_DRAFTS": 3, "PAGE_SIZE": 48, "LOGITS": 4, "BLOCK": 512} | SHARD,
    ),
    "item": Kernel(
        "prepare_items",
        "item_kernel",
        {"GROUPS": 2, "SPLITS": 16, "BLOCK": 512} | LISTS,
    ),
    **{
        f"greedy-{dtype}": Kernel(
            "greedy",
            "_greedy_kernel",
            {"STRIDE_UNIT": 16, "BLOCK": 4096},
            num_warps=8,
            types={"logits_ptr": f"*{dtype}"},
        )
        for dtype in ("fp32", "bf16")
    },
    "commit": Kernel(
        "commit",
        "_commit_kernel",
        {"MAX_DRAFTS": 8, "PLACES": 16, "STOPS": 8, "STOPS_PADDED": 8},
        num_warps=1,
    ),
    "ngram-draft": Kernel(
        "ngram_draft",
        "_ngram_draft_kernel",
        {"MAX_MATCH": 4, "MAX_DRAFTS": 8, "PLACES": 8, "BLOCK": 4096},
        num_warps=8,
    ),
    **{
        f"sample-{dtype}": Kernel(
            "sample",
            "_sample_kernel",
            {
                "UNIT": 16,
                "IN_PROMPT": IN_PROMPT,
                "COLDEST": COLDEST,
                "ROWS": 1024,
                "BLOCK": 4096,
            },
            num_warps=16,
            fp_fusion=False,
            types={"logits_ptr": f"*{dtype}"},
        )
        for dtype in ("fp32", "bf16")
    },
    "count": Kernel(
        "count_tokens",
        "_count_kernel",
        {
            "UNIT": 16,
            "IN_PROMPT": IN_PROMPT,
            "EMITTED": 9,
            "ROWS": 1024,
            "PLACES": 16,
            "BLOCK": 4096,
        },
        num_warps=8,
    ),
    "scale": partial_kernel("scale_partial", "scale_kernel", SHARES | {"RANKS": 8}),
    "pack": partial_kernel("pack_partial", "pack_kernel", SHARES | MESSAGE),
    "merge-packed": partial_kernel("merge_packed", "merge_packed_kernel", MERGED | MESSAGE),
    "merge-packed-32-ranks": partial_kernel(
        "merge_packed", "merge_packed_kernel", MERGED | MESSAGE | {"RANKS": 32}
    ),
}


def step_jobs(arch: str) -> Iterator[tuple[str, Job]]:
    """Name and compile job of each."""
    for name, kernel in KERNELS.items():
        yield name, kernel.job(arch)
