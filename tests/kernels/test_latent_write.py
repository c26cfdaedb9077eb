"""The Triton latent write against its oracle: interpreted, or on a GPU if there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphattn.kernels.latent_write import latent_write
from graphattn.kernels.latent_write_ref import latent_write_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGES, PAGE_SIZE = 5, 6


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int) -> Tensor:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return noise.to(dtype).to(DEVICE)


def fresh_pool(dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return draw(PAGES, PAGE_SIZE, dim, dtype=dtype, seed=3)


def slots(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(576, torch.bfloat16), (48, torch.float32), (52, torch.float16), (9, torch.bfloat16)],
    ids=str,
)
def test_writes_exactly_the_named_entries(dim: int, dtype: torch.dtype) -> None:
    """First and last entry of the pool, both sides of a page's end, and places without an entry.

    Slot -1 as an index from the end would be the last entry. The latents of such places are NaN, so
    a trace of them would show.
    """
    kv_slot = slots(0, -1, PAGE_SIZE - 1, PAGE_SIZE, -1, PAGES * PAGE_SIZE - 1, 14)
    latent = draw(len(kv_slot), dim, dtype=dtype, seed=1)
    latent[kv_slot < 0] = torch.nan
    got, wanted = fresh_pool(dim, dtype), fresh_pool(dim, dtype)
    latent_write(latent, kv_slot, got)
    latent_write_ref(latent, kv_slot, wanted)
    assert torch.equal(got, wanted)
    assert not torch.equal(got, fresh_pool(dim, dtype))


def test_nothing_is_written_without_entries() -> None:
    latent, pool = torch.full((3, 16), torch.nan, device=DEVICE), fresh_pool(16)
    latent_write(latent, slots(-1, -1, -1), pool)
    latent_write(latent[:0], slots(), pool)
    assert torch.equal(pool, fresh_pool(16))


def test_nan_is_written_as_it_is() -> None:
    """A request whose latent is NaN must find it again, not a cleaned value."""
    pool = fresh_pool(16)
    latent_write(torch.full((1, 16), torch.nan, device=DEVICE), slots(7), pool)
    assert pool[1, 1].isnan().all()
    assert int(pool.isnan().sum()) == 16


def test_outer_strides() -> None:
    """A latent cut out of a wider projection; a pool that is one layer of many."""
    latent, kv_slot = draw(3, 29, seed=1)[:, 4:24], slots(29, -1, 3)
    layers, wanted = torch.stack([fresh_pool(20)] * 3, 1), fresh_pool(20)
    latent_write(latent, kv_slot, layers[:, 1])
    latent_write_ref(latent, kv_slot, wanted)
    assert torch.equal(layers[:, 1], wanted)
    assert torch.equal(layers[:, 0], fresh_pool(20))


WRONG: dict[str, tuple[str, Any]] = {
    "no rows": ("latent", lambda t: t[0]),
    "another dtype": ("latent", lambda t: t.half()),
    "columns first": ("latent", lambda t: t.mT.contiguous().mT),
    "narrow slots": ("kv_slot", lambda t: t.int()),
    "too few slots": ("kv_slot", lambda t: t[:1]),
    "other entries": ("pool", lambda t: t[..., :8]),
    "pages of heads": ("pool", lambda t: t[:, None]),
}


@pytest.mark.parametrize(("name", "change"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named_and_nothing_is_written(name: str, change: Any) -> None:
    pool = fresh_pool(16)
    args = {"latent": draw(2, 16, seed=1), "kv_slot": slots(3, 4), "pool": pool}
    args[name] = change(args[name])
    with pytest.raises(ValueError, match=f"^{name}: "):
        latent_write(*args.values())
    assert torch.equal(pool, fresh_pool(16))
