"""Packed constant linears: same results up to rounding, and they follow their weights."""

import torch
import torch.nn.functional as F
from torch import Tensor

from graphattn._capture.arena import Arena
from graphattn._capture.family import capture_family
from graphattn._capture.graph import Graph
from graphattn._capture.host import HostGraph
from graphattn._capture.prepack import MIN_ELEMENTS, PackedWeights

CPU = torch.device("cpu")


class Layer(torch.nn.Module):
    """Query, key and value of one input, then a linear with a bias, as an attention layer has."""

    def __init__(self, hidden: int = 512) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (
            torch.nn.Linear(hidden, size, bias=False) for size in (hidden, 320, 320)
        )
        self.o = torch.nn.Linear(320, hidden)
        self.small = torch.nn.Linear(hidden, 3)
        self.x = torch.randn(5, hidden)
        self.y = torch.zeros(5, hidden)

    def step(self) -> None:
        h = self.x.relu()
        q, k, v = self.q(h), self.k(h), self.v(h)
        self.y.copy_(self.o(k * v) + q + self.small(h).sum(-1, keepdim=True))

    def weights(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


def error_of_replay(layer: Layer, graph: Graph) -> tuple[float, float]:
    """Largest error of a replay against float64, and of an eager run: both round."""
    graph.replay()
    packed = layer.y.clone()
    with torch.no_grad():
        layer.step()
        eager = layer.y.clone()
        wide = lambda linear, x: (  # noqa: E731
            x @ linear.weight.double().t() + (0 if linear.bias is None else linear.bias.double())
        )
        h = layer.x.relu().double()
        exact = wide(layer.o, wide(layer.k, h) * wide(layer.v, h)) + wide(layer.q, h)
        exact += wide(layer.small, h).sum(-1, keepdim=True)
    return (packed - exact).abs().max().item(), (eager - exact).abs().max().item()


def test_linears_of_one_input_become_one_and_results_agree() -> None:
    layer = Layer()
    graphs = capture_family(
        {"step": layer.step}, backend="host", device=CPU, weights=layer.weights(), prepack=True
    )
    assert graphs["step"].info.kinds["packed"] == 2  # q, k, v together; o with its bias
    packed, eager = error_of_replay(layer, graphs["step"])
    # both are sums of 512 products in float32, in different orders
    assert packed <= 2 * eager + 512 * torch.finfo(torch.float32).eps


def test_in_place_weight_updates_are_packed_again() -> None:
    layer = Layer()
    graphs = capture_family(
        {"large": layer.step, "small": layer.step},
        backend="host",
        device=CPU,
        weights=layer.weights(),
        prepack=True,
    )
    for name, graph in graphs.items():
        with torch.no_grad():
            layer.k.weight.mul_(-2)
            layer.o.weight.copy_(torch.randn_like(layer.o.weight) / 16)
            layer.o.bias.add_(1)
        packed, eager = error_of_replay(layer, graph)
        assert packed <= 2 * eager + 512 * torch.finfo(torch.float32).eps, name


def test_graphs_of_a_family_share_one_packed_copy() -> None:
    layer = Layer()
    packed = PackedWeights(layer.weights().values())
    arena = Arena()
    graphs = [HostGraph(name, arena=arena, packed=packed) for name in "ab"]
    for graph in graphs:
        graph.capture(layer.step)
    assert graphs[0]._packs == graphs[1]._packs
    assert len(graphs[0]._packs) == 2
    large = [linear.weight.nbytes for linear in (layer.q, layer.k, layer.v, layer.o)]
    assert packed.nbytes == sum(large)
    assert graphs[0].info.memory_bytes >= sum(large)
    assert graphs[1].info.memory_bytes == 0


def test_what_is_not_packed() -> None:
    """Weights that nobody named, small ones, other types, weights whose changes nothing counts."""
    large = torch.randn(512, 512)
    with torch.inference_mode():
        uncounted = torch.randn(512, 512)
    x = torch.randn(3, 512)
    cases = {
        "unnamed": (large, ()),
        "small": (large[:100], (large[:100],)),
        "uncounted": (uncounted, (uncounted,)),
        "transposed": (large.t(), (large.t(),)),
        "float64": (large.double(), (large.double(),)),
    }
    assert large[:100].numel() < MIN_ELEMENTS
    for name, (weight, named) in cases.items():
        graph = HostGraph(name, packed=PackedWeights(named))
        inputs = x.to(weight.dtype)
        y = graph.capture(lambda weight=weight, inputs=inputs: F.linear(inputs, weight))
        graph.replay()
        assert "packed" not in graph.info.kinds, name
        assert torch.equal(y, F.linear(inputs, weight)), name


def test_without_prepack_nothing_is_packed_and_replay_is_exact() -> None:
    layer = Layer()
    graphs = capture_family(
        {"step": layer.step}, backend="host", device=CPU, weights=layer.weights()
    )
    graphs["step"].replay()
    replayed = layer.y.clone()
    with torch.no_grad():
        layer.step()
    assert torch.equal(replayed, layer.y)
    assert "packed" not in graphs["step"].info.kinds


def test_gate_and_up_join_across_the_activation_but_not_across_a_write() -> None:
    gate, up = (torch.randn(512, 512) for _ in range(2))
    x, flag = torch.randn(3, 512), torch.zeros(1)

    def joined() -> Tensor:
        h = x * 2
        return F.silu(F.linear(h, gate)) * F.linear(h, up)

    def written_between() -> Tensor:
        h = x * 2
        first = F.linear(h, gate)
        h.add_(1)
        return first * F.linear(h, up)

    def unrelated_write() -> Tensor:
        h = x * 2
        first = F.linear(h, gate)
        flag.add_(1)
        return first * F.linear(h, up)

    for program, calls in ((joined, 1), (written_between, 2), (unrelated_write, 2)):
        graph = HostGraph("mlp", packed=PackedWeights([gate, up]))
        y = graph.capture(program)
        graph.replay()
        assert graph.info.kinds["packed"] == calls
        with torch.no_grad():
            # |h| < 10 and |w| < 5 or so: 512 products of either rounding in the worst order
            assert (y - program()).abs().max() < 1e-5 * y.abs().max() * 512
