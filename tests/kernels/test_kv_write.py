"""The Triton KV write against its oracle: interpreted, or on a GPU if there is one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphattn.kernels.kv_write import kv_write
from graphattn.kernels.kv_write_ref import kv_write_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGES, PAGE_SIZE = 5, 6


def draw(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return noise.to(dtype).to(DEVICE)


def pools(kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (PAGES, kv_heads, PAGE_SIZE, dim)
    return draw(*shape, dtype=dtype, seed=3), draw(*shape, dtype=dtype, seed=4)


def slots(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def bits(t: Tensor) -> Tensor:
    """For comparisons in which NaN equals itself."""
    return t.contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    ("kv_heads", "dim", "dtype"),
    [
        (1, 64, torch.bfloat16),
        (3, 80, torch.float32),
        (2, 96, torch.float16),
        (5, 20, torch.bfloat16),
        (8, 256, torch.float32),
    ],
    ids=str,
)
def test_writes_exactly_the_named_entries(kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """First and last entry of the pool, both sides of a page's end, and places without an entry.

    Seen elsewhere: slot -1, used as an index from the end, wrote the last entry of the pool. The
    K and V of such places are NaN here, so a trace of them would show.
    """
    kv_slot = slots(0, -1, PAGE_SIZE - 1, PAGE_SIZE, -1, PAGES * PAGE_SIZE - 1, 14)
    k, v = (draw(len(kv_slot), kv_heads, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    k[kv_slot < 0] = v[kv_slot < 0] = torch.nan
    got, wanted = pools(kv_heads, dim, dtype), pools(kv_heads, dim, dtype)
    kv_write(k, v, kv_slot, *got)
    kv_write_ref(k, v, kv_slot, *wanted)
    for a, b, before in zip(got, wanted, pools(kv_heads, dim, dtype), strict=True):
        assert torch.equal(bits(a), bits(b))
        assert not torch.equal(a, before)


def test_nothing_is_written_without_entries() -> None:
    k = torch.full((3, 2, 16), torch.nan, device=DEVICE)
    got = pools(2, 16, torch.float32)
    kv_write(k, k, slots(-1, -1, -1), *got)
    kv_write(k[:0], k[:0], slots(), *got)
    for a, before in zip(got, pools(2, 16, torch.float32), strict=True):
        assert torch.equal(a, before)


def test_nan_is_written_as_it_is() -> None:
    """A request whose KV is NaN must find it again, not a cleaned value."""
    k_pool, v_pool = pools(2, 16, torch.bfloat16)
    k = torch.full((1, 2, 16), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    kv_write(k, k, slots(7), k_pool, v_pool)
    assert k_pool[1, :, 1].isnan().all()
    assert v_pool[1, :, 1].isnan().all()
    assert int(k_pool.isnan().sum()) == 2 * 16


def test_outer_strides() -> None:
    """K and V cut out of a fused projection with heads first, pools of another engine's layout."""
    kv_slot = slots(29, -1, 3)
    fused = draw(3, 6, 3, 20, dtype=torch.float32, seed=1)
    k, v = fused[:, 2:4, 1], fused.permute(1, 2, 0, 3)[4:6, 2].transpose(0, 1)
    contiguous, wanted = pools(2, 20, torch.float32), pools(2, 20, torch.float32)
    entries_first = contiguous[0].permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    layers = torch.stack([contiguous[1]] * 3, 1)
    kv_write(k, v, kv_slot, entries_first, layers[:, 1])
    kv_write_ref(k, v, kv_slot, *wanted)
    assert torch.equal(entries_first, wanted[0])
    assert torch.equal(layers[:, 1], wanted[1])
    assert torch.equal(layers[:, 0], contiguous[1])


WRONG = {
    "k": lambda t: t[0],
    "v": lambda t: t[:, :1],
    "kv_slot": lambda t: t.int(),
    "k_pool": lambda t: t[:, :, :, :8],
    "v_pool": lambda t: t[1:],
}
WRONG_LAYOUTS = {
    "k": lambda t: t.double(),
    "v": lambda t: t.mT.contiguous().mT,
    "kv_slot": lambda t: t.repeat_interleave(2)[::2],
    "k_pool": lambda t: t.half(),
    "v_pool": lambda t: t.mT.contiguous().mT,
}


@pytest.mark.parametrize("wrong", [WRONG, WRONG_LAYOUTS], ids=["shapes", "dtypes and strides"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named_and_nothing_is_written(name: str, wrong: dict) -> None:
    k_pool, v_pool = pools(2, 16, torch.float32)
    k = draw(2, 2, 16, dtype=torch.float32, seed=1)
    args = {"k": k, "v": k, "kv_slot": slots(3, 4), "k_pool": k_pool, "v_pool": v_pool}
    args[name] = wrong[name](args[name])
    named = "[kv]" if wrong is WRONG_LAYOUTS and name == "k_pool" else name
    with pytest.raises(ValueError, match=f"^{named}: "):
        kv_write(*args.values())
    for a, before in zip((k_pool, v_pool), pools(2, 16, torch.float32), strict=True):
        assert torch.equal(a, before)
