"""The public operations: what they refuse, and that they refuse it before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from graphattn import ConfigError, ops
from graphattn._capture.host import HostGraph
from tests.kernels import attend_case, latent_case
from tests.kernels.attend_case import Row, Setting
from tests.runtime.op_case import attend_args, attend_latent_args

ROWS = [Row(20), Row(3, 2), Row(0, 6, prefill=True)]


def attend_call() -> dict[str, Any]:
    return attend_args(
        attend_case.build(ROWS, Setting(device="cpu", sinks=True, decode_query_len=2))
    )


def latent_call() -> dict[str, Any]:
    setting = Setting(device="cpu", decode_query_len=2)
    return attend_latent_args(latent_case.build(ROWS, latent_case.Latent(setting=setting)))


def change(args: dict[str, Any], name: str, edit: Callable[[Any], Any]) -> None:
    """Edit an argument, or a field "argument.field"."""
    name, _, field = name.partition(".")
    if field and isinstance(args[name], tuple):
        args[name] = args[name]._replace(**{field: edit(getattr(args[name], field))})
    elif field:
        args[name] = replace(args[name], **{field: edit(getattr(args[name], field))})
    else:
        args[name] = edit(args[name])


def expanded(t: Tensor) -> Tensor:
    return t[:1].expand_as(t)


WORK: dict[str, tuple[Callable[[Any], Any], str]] = {
    "work.page_table": (lambda t: t.long(), r"int32, got torch.int64.*copy_\(work.page_table\)"),
    "work.slot_of_row": (lambda t: t.long(), "int32"),
    "work.query_start": (lambda t: t[:-1], r"shape \[4\]"),
    "work.visible_start": (lambda t: t.long(), "int32"),
    "work.visible_end": (lambda t: t[:-1], r"shape \[T\] with T = 9"),
    "work.row_begin": (lambda t: t[None], "shape"),
    "work.row_end": (lambda t: t.float(), "int32"),
    "work.row_chunk": (lambda t: t.repeat_interleave(2)[::2], "contiguous"),
    "work.row_splits": (lambda t: t[:-1], "shape"),
    "work.decode_items": (lambda t: t[:-1], "multiple of the 3 rows"),
    "work.decode_count": (lambda t: t[0], "shape"),
    "work.prefill_items": (lambda t: None, "or neither"),
    "work.prefill_count": (lambda t: t.long(), "int32"),
    "work.decode_query_len": (lambda n: 0, "number >= 1"),
    "work.prefill_block": (lambda n: torch.tensor(4), "number"),
    "partials.out": (lambda t: t[..., 0], "shape"),
    "partials.lse": (lambda t: t.double(), "float32"),
    "lse": (lambda t: t[:, 0], "shape"),
    "scale": (lambda x: torch.tensor(x), "Python number"),
}  # fmt: skip

ATTEND = WORK | {
    "q": (lambda t: t[:, :5], "multiple of the 2 KV heads"),
    "k_pool": (lambda t: t[..., :-1], "shape"),
    "v_pool": (lambda t: t.half(), "float32, got torch.float16"),
    "sinks": (lambda t: t.double(), "float32"),
    "softcap": (lambda x: -1.0, "number >= 0"),
    "out": (lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), "contiguous"),
}
LATENT = WORK | {
    "q": (lambda t: t.repeat(1, 70, 1), "heads|shape"),
    "pool": (lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), "contiguous last"),
    "out": (lambda t: t[..., :-1].contiguous(), "shape|Dv"),
}


@pytest.mark.parametrize("name", ATTEND)
def test_attend_names_a_wrong_argument(name: str) -> None:
    args, (edit, message) = attend_call(), ATTEND[name]
    out, lse = args["out"], args["lse"]
    change(args, name, edit)
    with pytest.raises(ConfigError, match=rf"^{name}: wanted .*({message})"):
        ops.attend(**args)
    assert out.isnan().all()
    assert lse.isnan().all()


@pytest.mark.parametrize("name", LATENT)
def test_attend_latent_names_a_wrong_argument(name: str) -> None:
    args, (edit, message) = latent_call(), LATENT[name]
    out = args["out"]
    change(args, name, edit)
    with pytest.raises(ConfigError, match=rf"^\S+: wanted .*({message})"):
        ops.attend_latent(**args)
    assert out.isnan().all()


@pytest.mark.parametrize(
    ("heads", "dim", "value_dim", "message"),
    [
        (129, 48, 32, "q: wanted a number of heads from 1 to 128, got 129"),
        (2, 600, 540, "out: wanted a value size Dv from 1 to 512, got 540"),
        (2, 97, 32, "q: wanted D - Dv, what is key only, from 1 to 64, got 65"),
        (2, 32, 32, "q: wanted D - Dv, what is key only, from 1 to 64, got 0"),
    ],
)
def test_latents_that_no_kernel_covers(heads: int, dim: int, value_dim: int, message: str) -> None:
    args = latent_call()
    args["q"], args["pool"] = torch.zeros(9, heads, dim), torch.zeros(2, 4, dim)
    args["out"] = torch.zeros(9, heads, value_dim)
    with pytest.raises(ConfigError, match=f"^{message}"):
        ops.attend_latent(**args)


def test_head_sizes_that_no_kernel_covers() -> None:
    args = attend_call()
    args["q"] = torch.zeros(9, 6, 257)
    args["k_pool"] = args["v_pool"] = torch.zeros(2, 2, 4, 257)
    with pytest.raises(ConfigError, match=r"^q: wanted a head size from 1 to 256, got 257"):
        ops.attend(**args)


def write_call() -> dict[str, Any]:
    return {
        "k": torch.ones(3, 2, 8),
        "v": torch.ones(3, 2, 8),
        "kv_slot": torch.tensor([0, -1, 5]),
        "k_pool": torch.zeros(2, 2, 4, 8),
        "v_pool": torch.zeros(2, 2, 4, 8),
    }


WRITE: dict[str, list[tuple[Callable[[Any], Any], str]]] = {
    "k": [
        (lambda t: t.int(), "float32 or bfloat16 or float16"),
        (lambda t: t.tolist(), "a tensor, got 'list'"),
        (lambda t: t[:, :, ::2], r"last dimension"),
        (lambda t: t.clone().requires_grad_(), r"no gradient.*torch.no_grad\(\)"),
    ],
    "v": [(lambda t: t[:2], r"shape \[T, Hkv, D\] with T = 3, Hkv = 2, D = 8, got \[2, 2, 8\]")],
    "kv_slot": [
        (lambda t: t.int(), r"int64, got torch.int32. Convert it: kv_slot.to\(torch.int64\)"),
        (lambda t: t.to("meta"), "a tensor on cpu, where k is, got 'meta'"),
    ],
    "k_pool": [(expanded, "memory of its own for every element"), (lambda t: t[0], "shape")],
    "v_pool": [(lambda t: t.bfloat16(), "float32"), (lambda t: t[:1], "pages = 2")],
}


@pytest.mark.parametrize(("name", "case"), [(n, i) for n in WRITE for i in range(len(WRITE[n]))])
def test_kv_write_names_a_wrong_argument(name: str, case: int) -> None:
    args, (edit, message) = write_call(), WRITE[name][case]
    pools = args["k_pool"], args["v_pool"]
    args[name] = edit(args[name])
    with pytest.raises(ConfigError, match=f"^{name}: wanted .*{message}"):
        ops.kv_write(**args)
    assert not any(pool.any() for pool in pools)


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("latent", lambda t: t[0], "shape"),
        ("kv_slot", lambda t: t[:2], "T = 3"),
        ("pool", lambda t: t.half(), "float32"),
        ("pool", lambda t: t[..., :7], "D = 8"),
    ],
)
def test_latent_write_names_a_wrong_argument(
    name: str, edit: Callable[[Any], Any], message: str
) -> None:
    args = {
        "latent": torch.ones(3, 8),
        "kv_slot": torch.tensor([0, -1, 5]),
        "pool": torch.zeros(2, 4, 8),
    }
    args[name] = edit(args[name])
    with pytest.raises(ConfigError, match=f"^{name}: wanted .*{message}"):
        ops.latent_write(**args)


SCALES = [
    ("k_scale", torch.float32, torch.ones(1), "None for pools that are not FP8"),
    ("k_scale", torch.float8_e4m3fn, torch.ones(3), r"shape \[1\] or \[2\], got \[3\]"),
    ("v_scale", torch.float8_e4m3fn, torch.ones(2).double(), "float32"),
    ("v_scale", torch.float8_e4m3fn, torch.ones(2, 1), "shape"),
]


@pytest.mark.parametrize(("name", "dtype", "factor", "message"), SCALES)
def test_wrong_scales_are_named(
    name: str, dtype: torch.dtype, factor: Tensor, message: str
) -> None:
    write, call = write_call(), attend_call()
    for args in (write, call):
        args["k_pool"], args["v_pool"] = args["k_pool"].to(dtype), args["v_pool"].to(dtype)
    with pytest.raises(ConfigError, match=f"^{name}: wanted .*{message}"):
        ops.kv_write(**write, **{name: factor})
    with pytest.raises(ConfigError, match=f"^{name}: wanted .*{message}"):
        ops.attend(**(call | {name: factor}))
    assert not any(write[n].float().any() for n in ("k_pool", "v_pool"))


def test_wrong_scales_of_latents_are_named() -> None:
    latent, kv_slot = torch.ones(1, 8), torch.tensor([0])
    pool = torch.zeros(2, 4, 8).to(torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match=r"^latent_scale: wanted shape \[2\], got \[1\]"):
        ops.latent_write(latent, kv_slot, pool, latent_scale=torch.ones(1), value_dim=6)
    with pytest.raises(ConfigError, match=r"^value_dim: wanted a size from 1 to 7, got 0"):
        ops.latent_write(latent, kv_slot, pool, latent_scale=torch.ones(2))
    args = latent_call()
    with pytest.raises(ConfigError, match=r"^latent_scale: wanted None for pools that are not FP8"):
        ops.attend_latent(**(args | {"latent_scale": torch.ones(2)}))


def partial_call(op: str) -> dict[str, Any]:
    out, lse = torch.randn(5, 6, 8), torch.randn(5, 6)
    message = torch.zeros(2, 15, 9)
    return {
        "scale_partial": {
            "out": out,
            "lse": lse,
            "lses": torch.stack([lse, lse]),
            "scaled": torch.zeros(2, 5, 3, 8),
            "sinks": torch.zeros(6),
        },
        "pack_partial": {"out": out, "lse": lse, "message": message, "by_head": True},
        "merge_packed": {
            "message": message,
            "merged": torch.zeros(15, 8),
            "sinks": torch.zeros(3),
            "first_row": 0,
        },
    }[op]


PARTIAL = [
    ("scale_partial", "out", lambda t: t.transpose(0, 1), "contiguous|shape"),
    ("scale_partial", "lse", lambda t: t.half(), "float32"),
    ("scale_partial", "lses", lambda t: t[:, :4], "shape"),
    ("scale_partial", "scaled", lambda t: t[:1], "slices that hold the 6 heads"),
    ("scale_partial", "sinks", lambda t: t[:5], "H = 6"),
    ("pack_partial", "message", lambda t: t[:, :14].contiguous(), "15 rows a rank, got 14"),
    ("pack_partial", "message", lambda t: t.repeat(2, 1, 1), "ranks that divide 6 heads, got 4"),
    ("pack_partial", "message", lambda t: t[:0], "at least one rank"),
    ("pack_partial", "message", lambda t: t[..., :8], "shape"),
    ("merge_packed", "merged", lambda t: t[:4, :, None], "shape"),
    ("merge_packed", "first_row", lambda n: -1, "number >= 0"),
    ("merge_packed", "sinks", lambda t: t.double(), "float32"),
]


@pytest.mark.parametrize(("op", "name", "edit", "message"), PARTIAL)
def test_combining_names_a_wrong_argument(
    op: str, name: str, edit: Callable[[Any], Any], message: str
) -> None:
    args = partial_call(op)
    getattr(ops, op)(**args)
    args[name] = edit(args[name])
    with pytest.raises(ConfigError, match=f"^{name}: wanted .*({message})"):
        getattr(ops, op)(**args)


def test_rows_whose_lse_would_be_misaligned() -> None:
    out, lse = torch.zeros(2, 3, 7, dtype=torch.bfloat16), torch.zeros(2, 3)
    message = torch.zeros(1, 6, 9, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"^D: wanted rows of a multiple of 4 bytes, got 7"):
        ops.pack_partial(out, lse, message, by_head=False)


def sample_call() -> dict[str, Any]:
    def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((2,), value, dtype=dtype)

    ints = torch.int32
    return {
        "logits": torch.randn(3, 11),
        "slot_of_row": torch.tensor([1, 0], dtype=ints),
        "logits_start": torch.tensor([0, 1, 3], dtype=ints),
        "logits_count": torch.tensor([1, 2], dtype=ints),
        "seq_len": torch.tensor([4, 7], dtype=ints),
        "draft_tokens": torch.zeros(2, 1, dtype=ints),
        "slots": ops.SamplingSlots(
            temperature=full(0.0),
            top_k=full(0, ints),
            top_p=full(1.0),
            repetition_penalty=full(1.0),
            presence_penalty=full(0.0),
            frequency_penalty=full(0.0),
            seed=torch.zeros(2, 2, dtype=ints),
            occurrences=torch.zeros(2, 11, dtype=ints),
        ),
        "sampled": torch.full((3,), -7, dtype=ints),
        "logprob": torch.zeros(3),
    }


SAMPLE = {
    "logits": lambda t: t[0],
    "slot_of_row": lambda t: t.long(),
    "logits_start": lambda t: t[:2],
    "logits_count": lambda t: t[:1],
    "seq_len": lambda t: t.float(),
    "draft_tokens": lambda t: t[:, 0],
    "sampled": lambda t: t.long(),
    "logprob": lambda t: t.double(),
    "slots.occurrences": lambda t: t[:, :10].contiguous(),
    "slots.seed": lambda t: t[:, 0],
} | {
    f"slots.{f.name}": lambda t: t.double()
    for f in fields(ops.SamplingSlots)
    if f.name not in ("occurrences", "seed")
}


@pytest.mark.parametrize("name", SAMPLE)
def test_sample_names_a_wrong_argument(name: str) -> None:
    args = sample_call()
    change(args, name, SAMPLE[name])
    with pytest.raises(ConfigError, match=f"^{name}: wanted "):
        ops.sample(**args)
    assert (sample_call()["sampled"] == -7).all()


def test_sample_and_greedy_agree_at_temperature_zero() -> None:
    args = sample_call()
    ops.sample(**args)
    sampled = torch.zeros(3, dtype=torch.int32)
    ops.greedy(args["logits"], sampled)
    assert torch.equal(args["sampled"], sampled)
    assert sampled.tolist() == args["logits"].argmax(-1).tolist()
    with pytest.raises(ConfigError, match=r"^sampled: wanted int32"):
        ops.greedy(args["logits"], sampled.long())


def test_a_captured_call_reads_contents_anew() -> None:
    """The checks are of the host: nothing of them is in the graph, and nothing is frozen."""
    case = attend_case.build(ROWS, Setting(device="cpu", decode_query_len=2))
    args = attend_args(case)
    graph = HostGraph("attend")
    graph.capture(lambda: ops.attend(**args))
    assert args["out"].isnan().all()
    graph.replay()
    attend_case.check(case)
    args["work"].visible_end[0] -= 9
    args["out"].fill_(torch.nan)
    graph.replay()
    attend_case.check(case)
