"""The plan of intermediates against a naive check, and the memory that it saves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from graphattn._capture.arena import ALIGNMENT, Arena, Lifetime, plan, poison
from graphattn._capture.host import HostGraph

LIFETIMES = st.lists(
    st.builds(
        lambda first, length, nbytes: Lifetime(first, first + length, nbytes),
        st.integers(0, 30),
        st.integers(0, 10),
        st.sampled_from([0, 1, 63, 64, 65, 1000, 4096]),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(LIFETIMES)
def test_intermediates_that_are_alive_together_never_overlap(lifetimes: list[Lifetime]) -> None:
    offsets, total = plan(lifetimes)
    for i, (a, at) in enumerate(zip(lifetimes, offsets, strict=True)):
        assert at % ALIGNMENT == 0
        assert at + a.nbytes <= total
        for b, bt in list(zip(lifetimes, offsets, strict=True))[:i]:
            together = a.first <= b.last and b.first <= a.last and a.nbytes and b.nbytes
            assert not together or at + a.nbytes <= bt or bt + b.nbytes <= at


def test_a_chain_needs_two_places() -> None:
    """Each operation reads the one before: its own place and that one's, however long the chain."""
    lifetimes = [Lifetime(i, i + 1, 1000) for i in range(100)]
    _, total = plan(lifetimes)
    assert total == 2 * 1024


def test_gaps_join_and_the_end_grows() -> None:
    small = [Lifetime(0, 1, 64), Lifetime(0, 1, 64)]
    _, total = plan([*small, Lifetime(2, 3, 128)])
    assert total == 128
    _, total = plan([*small, Lifetime(2, 3, 192)])
    assert total == 192


def test_a_deep_model_takes_the_arena_of_a_shallow_one() -> None:
    def bytes_of(layers: int) -> int:
        weights = [torch.eye(64) for _ in range(layers)]
        x = torch.ones(256, 64)

        def program() -> torch.Tensor:
            h = x
            for weight in weights:
                h = h + torch.nn.functional.silu(h @ weight) * 0.5
            return h.sum(0)

        arena = Arena()
        HostGraph("deep", arena=arena).capture(program)
        return arena.storage.nbytes()

    assert bytes_of(40) == bytes_of(3) == 3 * 256 * 64 * 4


def test_graphs_of_one_arena_replayed_in_any_order() -> None:
    """Staging memory recycled between captured graphs garbled results elsewhere: with four graphs
    all was well, with eight not. Here eight sizes are replayed interleaved, in a shared arena."""
    arena = Arena()
    source = torch.zeros(64, 8)
    weight = torch.arange(64.0).view(8, 8) / 64
    graphs, results = {}, {}

    def program(rows: int) -> torch.Tensor:
        h = source[:rows] @ weight
        return (h.softmax(-1) + h.tanh() * torch.arange(rows)[:, None]).cumsum(0)

    for rows in (64, 37, 32, 16, 8, 4, 2, 1):
        graphs[rows] = HostGraph(f"rows {rows}", arena=arena)
        results[rows] = graphs[rows].capture(lambda rows=rows: program(rows))
    for step in range(40):
        rows = list(graphs)[step * 5 % len(graphs)]
        source.copy_(torch.randn(64, 8, generator=torch.Generator().manual_seed(step)))
        kept = {other: result.clone() for other, result in results.items() if other != rows}
        graphs[rows].replay()
        assert torch.equal(results[rows], program(rows))
        for other, result in kept.items():
            assert torch.equal(result.isnan(), results[other].isnan())
            assert torch.equal(result.nan_to_num(), results[other].nan_to_num())


def test_a_graph_captured_before_the_arena_grew_still_runs() -> None:
    arena = Arena()
    x = torch.ones(4, 4)
    small = HostGraph("small", arena=arena)
    y = small.capture(lambda: (x + 1) * 2)
    before = arena.storage.nbytes()
    HostGraph("large", arena=arena).capture(lambda: (x.repeat(50, 50) + 1) * 2)
    assert arena.storage.nbytes() > before
    small.replay()
    assert y.tolist() == [[4.0] * 4] * 4


def test_memory_of_a_graph_is_the_growth_of_the_arena_and_its_outputs() -> None:
    arena = Arena()
    x = torch.ones(100, 16)
    infos = []
    for rows in (100, 50):
        graph = HostGraph(f"{rows}", arena=arena)
        graph.capture(lambda rows=rows: (x[:rows] + 1).sum(0))
        infos.append(graph.info.memory_bytes)
    assert infos == [100 * 16 * 4 + 64, 64]


@pytest.mark.parametrize("nbytes", [0, 3, 64, 67])
def test_poison_is_nan_in_floats_and_out_of_range_in_indices(nbytes: int) -> None:
    storage = torch.zeros(nbytes, dtype=torch.uint8).untyped_storage()
    poison(storage)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        count = nbytes // 4 * 4 // dtype.itemsize
        values = torch.empty(0, dtype=dtype).set_(storage, 0, (count,), (1,))
        assert values.float().isnan().all(), dtype
    for dtype in (torch.int64, torch.int32):
        values = torch.empty(0, dtype=dtype).set_(storage, 0, (nbytes // dtype.itemsize,), (1,))
        assert (values >= 2**31 - 1).all(), dtype


def test_nothing_of_a_recording_outlives_it() -> None:
    """Recording holds no intermediate: a layer's activations are gone before the next layer."""
    storages: list[StorageWeakRef] = []
    x = torch.ones(1024)

    def program() -> torch.Tensor:
        h = x
        for _ in range(5):
            h = (h + 1) * 0.5
            with torch._C.DisableTorchFunction():
                storages.append(StorageWeakRef(h.untyped_storage()))
            assert all(storage.expired() for storage in storages[:-1])
        return h[:1].clone()

    HostGraph("lean").capture(program)
    assert len(storages) == 5
    assert storages[-1].expired()
