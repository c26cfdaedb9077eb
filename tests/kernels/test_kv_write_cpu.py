"""kv_write on the CPU against a loop over tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from graphattn.kernels import ops

_CANARY = math.nan


def _pool(
    layout: str, pages: int, heads: int, page_size: int, D: int, dtype: torch.dtype
) -> Tensor:
    """[pages, heads, page_size, D], filled with NaN."""
    if layout == "own":
        return torch.full((pages, heads, page_size, D), _CANARY, dtype=dtype)
    if layout == "tokens-first":  # heads innermost, as other runtimes keep it
        return torch.full((pages, page_size, heads, D), _CANARY, dtype=dtype).transpose(1, 2)
    return torch.full((pages, 2, heads, page_size, D), _CANARY, dtype=dtype)[:, 1]


@pytest.mark.parametrize("layout", ["own", "tokens-first", "k-beside-v"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "page_size", "D"), [(3, 16, 64), (1, 5, 80), (8, 1, 96)])
def test_only_named_entries_change(
    layout: str, dtype: torch.dtype, heads: int, page_size: int, D: int
) -> None:
    pages, T = 7, 11
    torch.manual_seed(0)
    k, v = torch.randn(2, T, heads, D).to(dtype)
    kv_slot = torch.randperm(pages * page_size)[:T]
    kv_slot = torch.nn.functional.pad(kv_slot, (0, T - len(kv_slot)), value=-1)
    kv_slot[[0, 4, 10]] = torch.tensor([-1, pages * page_size - 1, -1])
    kv_slot[5:][kv_slot[5:] == kv_slot[4]] = -1
    kv_slot[:4][kv_slot[:4] == kv_slot[4]] = -1
    pools = [_pool(layout, pages, heads, page_size, D, dtype) for _ in range(2)]
    ops.kv_write(k, v, kv_slot, *pools)
    for values, pool in zip((k, v), pools, strict=True):
        want = torch.full((pages, heads, page_size, D), _CANARY, dtype=dtype)
        for t, slot in enumerate(kv_slot.tolist()):
            if slot >= 0:
                want[slot // page_size, :, slot % page_size] = values[t]
        assert torch.equal(pool.isnan(), want.isnan())
        assert torch.equal(pool.nan_to_num(), want.nan_to_num())
    assert int((kv_slot >= 0).sum()) > 0


def test_no_token_writes_nothing() -> None:
    """Slot -1 as an index would be the last entry of the pool."""
    pools = [torch.zeros(2, 1, 4, 8) for _ in range(2)]
    x = torch.ones(3, 1, 8)
    ops.kv_write(x, x, torch.full((3,), -1), *pools)
    assert not any(pool.any() for pool in pools)


def test_strided_values() -> None:
    """K and V as slices of one projection [T, Hq + 2 Hkv, D]."""
    qkv = torch.randn(5, 4, 8)
    k_pool, v_pool = torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 4, 8)
    ops.kv_write(qkv[:, 2:3], qkv[:, 3:], torch.tensor([7, 0, -1, 3, 4]), k_pool, v_pool)
    assert torch.equal(k_pool[[1, 0, 0, 1], 0, [3, 0, 3, 0]], qkv[[0, 1, 3, 4], 2])
    assert torch.equal(v_pool[[1, 0, 0, 1], 0, [3, 0, 3, 0]], qkv[[0, 1, 3, 4], 3])
    assert int((k_pool != 0).any(-1).sum()) == 4
