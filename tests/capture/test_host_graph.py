"""One captured program on the host: its state, outputs, memory and lifecycle."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphattn._capture.arena import Arena
from graphattn._capture.graph import Graph, GraphState
from graphattn._capture.host import HostGraph

MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode}


def assert_equal(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> None:
    """Bitwise; the caches hold NaN where nothing was written."""
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor.isnan(), actual[name].isnan()), name
        assert torch.equal(tensor.nan_to_num(), actual[name].nan_to_num()), name


class DecodeStep:
    """A decoder with a cache that feeds itself: state, views, in-place writes, growth."""

    def __init__(self, batch: int, hidden: int = 24, layers: int = 3, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        make = lambda *size: torch.randn(size, generator=g) / size[-1] ** 0.5  # noqa: E731
        self.embed = make(31, hidden)
        self.qkv = [make(3 * hidden, hidden) for _ in range(layers)]
        self.mlp = [make(hidden, hidden) for _ in range(layers)]
        self.cache = torch.full((layers, 2, batch, 16, hidden), float("nan"))
        self.ids = torch.arange(batch)
        self.length = torch.zeros(1, dtype=torch.int64)

    def state(self) -> dict[str, Tensor]:
        return {"cache": self.cache, "ids": self.ids, "length": self.length}

    def __call__(self) -> Tensor:
        x = F.embedding(self.ids, self.embed)
        seen = (torch.arange(16) <= self.length)[:, None]
        for layer, (qkv, mlp) in enumerate(zip(self.qkv, self.mlp, strict=True)):
            h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
            q, k, v = F.linear(h, qkv).chunk(3, -1)
            keys, values = self.cache[layer]
            keys.index_copy_(1, self.length, k[:, None])
            values.index_copy_(1, self.length, v[:, None])
            scores = (torch.where(seen, keys, 0.0) @ q[:, :, None]).masked_fill(~seen, -1e9)
            x = x + (scores.softmax(1).mT @ torch.where(seen, values, 0.0))[:, 0]
            x = x + F.silu(F.linear(x, mlp))
        logits = x @ self.embed.t()
        self.ids.copy_(logits.argmax(-1))
        self.length.add_(1)
        return logits


def test_state_and_random_states_are_the_same_after_capture() -> None:
    step = DecodeStep(3)
    before = {n: t.clone() for n, t in step.state().items()}
    rng = torch.get_rng_state()
    HostGraph("step").capture(lambda: (step(), torch.rand(3)))
    assert_equal(before, step.state())
    assert torch.equal(rng, torch.get_rng_state())


@pytest.mark.parametrize("mode", MODES)
def test_a_decode_step_feeds_itself(mode: str) -> None:
    captured, eager = DecodeStep(3), DecodeStep(3)
    with MODES[mode]():
        graph = HostGraph("step")
        logits = graph.capture(captured)
    for _ in range(12):
        graph.replay()
        with MODES[mode]():
            assert torch.equal(eager(), logits)
    assert_equal(eager.state(), captured.state())


def test_outputs_and_intermediates_are_poisoned_until_a_replay() -> None:
    x = torch.ones(4)
    arena = Arena()
    graph = HostGraph("poison", arena=arena)
    doubled, count = graph.capture(lambda: ((x + 1) * 2, (x > 0).sum()))
    assert doubled.isnan().all()
    assert count > 1 << 40
    bytes_ = torch.empty(0, dtype=torch.float32).set_(arena.storage)
    assert bytes_.isnan().all()
    assert bytes_.numel() > 0
    graph.replay()
    assert doubled.tolist() == [4.0] * 4
    assert count == 4


def test_random_numbers_differ_per_replay_and_follow_the_seed() -> None:
    graph = HostGraph("random")
    noise = graph.capture(lambda: torch.rand(4) + F.dropout(torch.ones(4)))
    torch.manual_seed(3)
    graph.replay()
    first = noise.clone()
    graph.replay()
    assert not torch.equal(first, noise)
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(4) + F.dropout(torch.ones(4)))


def test_a_tensor_that_the_program_keeps_is_rewritten_by_replays() -> None:
    """As with a CUDA graph pool: memory that somebody still holds is not handed on."""
    x, kept = torch.zeros(3), {}

    def program() -> None:
        kept["hidden"] = x + 1
        (kept["hidden"] * 2 + torch.arange(3)).sum()

    graph = HostGraph("keeps")
    graph.capture(program)
    assert kept["hidden"].isnan().all()
    x.fill_(4)
    graph.replay()
    assert kept["hidden"].tolist() == [5.0] * 3


def test_in_place_weight_updates_are_seen() -> None:
    weight, x = torch.eye(3), torch.ones(2, 3)
    graph = HostGraph("weights")
    y = graph.capture(lambda: F.linear(x, weight))
    weight.mul_(3)
    graph.replay()
    assert y.tolist() == [[3.0] * 3] * 2


def test_a_replaced_weight_keeps_its_old_address() -> None:
    """A graph holds addresses: what `parameter.data = other` leaves behind is still what runs."""
    weight, x = torch.nn.Parameter(torch.eye(3)), torch.ones(2, 3)
    graph = HostGraph("replaced")
    y = graph.capture(lambda: F.linear(x, weight))
    weight.data = torch.zeros(3, 3)
    graph.replay()
    assert y.tolist() == [[1.0] * 3] * 2


def test_custom_ops_that_only_mutate_are_replayed_in_place() -> None:
    library = torch.library.Library("graphattn_test_host", "DEF")
    library.define("scale(Tensor x, float by, Tensor(a!) out) -> ()")
    calls = []

    def scale(x: Tensor, by: float, out: Tensor) -> None:
        calls.append(x.tolist())  # an implementation may read: on CUDA it is a kernel
        out.copy_(x * by)

    library.impl("scale", scale, "CPU")
    x, out = torch.ones(2), torch.zeros(2)

    def program() -> Tensor:
        torch.ops.graphattn_test_host.scale(x + 1, 2.0, out)
        return out + 1

    graph = HostGraph("custom")
    y = graph.capture(program)
    assert out.tolist() == [0.0, 0.0]
    x.fill_(2)
    graph.replay()
    assert (out.tolist(), y.tolist(), calls) == ([6.0] * 2, [7.0] * 2, [[2.0] * 2, [3.0] * 2])
    assert graph.info.kinds == {"out": 2, "in place": 1}


def test_views_and_allocations_are_not_replayed() -> None:
    x = torch.ones(4, 4)

    def program() -> Tensor:
        scratch = torch.empty(4, 4)
        return scratch.copy_(x.view(16).reshape(4, 4).t().unsqueeze(0).squeeze(0))[1:]

    graph = HostGraph("views")
    graph.capture(program)
    assert graph.info.node_count == 1


def test_addresses_and_memory_stay_over_a_thousand_replays() -> None:
    step = DecodeStep(16)
    graph = HostGraph("soak")
    logits = graph.capture(step)
    addresses = [t.data_ptr() for t in (logits, *step.state().values())]
    nodes = graph.info.node_count

    def soak(replays: int) -> int:
        for _ in range(replays):
            step.length.zero_()
            graph.replay()
        return resident_pages()

    settled = soak(100)
    assert soak(900) - settled < 128  # pages: 0.5 MB, where one leaked logits tensor makes 1.8 MB
    assert addresses == [t.data_ptr() for t in (logits, *step.state().values())]
    assert graph.info.node_count == nodes


def resident_pages() -> int:
    gc.collect()
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1])


def test_states_of_a_graph() -> None:
    graph: Graph = HostGraph("states")
    assert graph.state is GraphState.NEW
    with pytest.raises(
        RuntimeError, match=r"'states': replay needs a graph that is ready, .* is new"
    ):
        graph.replay()
    with pytest.raises(RuntimeError, match="info needs a graph that is ready"):
        _ = graph.info
    graph.capture(lambda: None)
    assert graph.state is GraphState.READY
    with pytest.raises(RuntimeError, match="capture needs a graph that is new, this one is ready"):
        graph.capture(lambda: None)
    graph.close()
    graph.close()
    with pytest.raises(RuntimeError, match=r"replay needs a graph that is ready, .* is closed"):
        graph.replay()


def test_closing_releases_memory() -> None:
    graph = HostGraph("closes")
    x = [torch.ones(3)]
    held = StorageWeakRef(x[0].untyped_storage())
    graph.capture(lambda: x[0] + 1)
    x.clear()
    assert not held.expired()
    graph.close()
    gc.collect()
    assert held.expired()


def test_an_assertion_on_the_device_is_replayed() -> None:
    """It returns nothing and writes nothing, and yet it is work."""
    limit, length = torch.tensor(8), torch.tensor(3)

    def step() -> None:
        torch._assert_async(length < limit, "the sequence is too long")

    graph = HostGraph("step")
    graph.capture(step)
    assert graph.info.operations == {"aten.lt.Tensor": 1, "aten._assert_async.msg": 1}
    graph.replay()
    length.fill_(9)
    with pytest.raises(RuntimeError, match="the sequence is too long"):
        graph.replay()
