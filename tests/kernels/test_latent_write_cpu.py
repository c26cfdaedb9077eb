"""latent_write on the CPU against its oracle."""

from __future__ import annotations

import pytest
import torch

from graphattn.kernels import ops
from graphattn.kernels.latent_write_ref import latent_write_ref


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_only_named_entries_change(dtype: torch.dtype, strided: bool) -> None:
    """Slot -1, as an index from the end, would be the last entry of the pool."""
    torch.manual_seed(0)
    pages, page_size, dim = 5, 6, 20
    latent = torch.randn(6, dim + 7)[:, :dim].to(dtype)
    kv_slot = torch.tensor([0, -1, page_size - 1, page_size, -1, 14])
    latent[kv_slot < 0] = torch.nan
    got = torch.randn(pages, 2, page_size, dim).to(dtype)[:, 1]
    got = got if strided else got.contiguous()
    wanted = got.clone()
    latent_write_ref(latent, kv_slot, wanted)
    ops.latent_write(latent, kv_slot, got)
    assert torch.equal(got, wanted)
    assert torch.equal(got[2, 2], latent[5])


def test_no_token_writes_nothing() -> None:
    pool = torch.zeros(2, 4, 8)
    ops.latent_write(torch.ones(3, 8), torch.full((3,), -1), pool)
    ops.latent_write(torch.ones(0, 8), torch.empty(0, dtype=torch.int64), pool)
    assert not pool.any()
