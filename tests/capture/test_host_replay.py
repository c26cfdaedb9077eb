"""A replay on the host equals an eager run, bit for bit, whatever the program is made of."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphattn._capture.arena import Arena
from graphattn._capture.graph import Graph, GraphState, gc_paused
from graphattn._capture.host import HostGraph
from graphattn._capture.storages import tensors_in


@pytest.fixture(autouse=True, scope="module")
def no_gc() -> Iterator[None]:
    """Captures collect garbage unless somebody has it off: too slow for many tiny programs."""
    with gc_paused():
        yield


MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode}


class Memory:
    """Inputs and state of the small programs below."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.x = torch.randn(5, 7)
        self.y = torch.randn(5, 7)
        self.w = torch.randn(11, 7)
        self.b = torch.randn(11)
        self.ids = torch.randint(0, 11, (5,))
        self.mask = torch.rand(5, 7) > 0.5
        self.scalar = torch.tensor(1.5)
        self.cache = torch.randn(9, 7)
        self.bf = torch.randn(5, 7, dtype=torch.bfloat16)
        self.pos = torch.tensor([3])

    def tensors(self) -> dict[str, Tensor]:
        return vars(self)

    def refresh(self, seed: int) -> None:
        """New contents, same addresses."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in (self.x, self.y, self.w, self.b, self.cache, self.bf):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        self.ids.copy_(torch.randint(0, 11, (5,), generator=generator))
        self.mask.copy_(torch.rand(5, 7, generator=generator) > 0.5)
        self.pos.copy_(torch.randint(0, 9, (1,), generator=generator))


def _setitem_slices(m: Memory) -> Tensor:
    out = torch.zeros(5, 9)
    out[:, 1:8] = m.x
    out[0] = 3.0
    out[:, -1] = m.b[:5]
    return out


def _inplace_chain(m: Memory) -> Tensor:
    h = m.x.clone()
    h.mul_(2).add_(m.y, alpha=0.5)
    view = h.view(7, 5).t()
    view.sub_(1)
    h[:, 2:4] *= m.scalar
    return h


def _out_of_scratch(m: Memory) -> Tensor:
    scratch = torch.empty(5, 11)
    torch.mm(m.x, m.w.t(), out=scratch)
    return scratch.relu_() + 1


def _attention(m: Memory) -> Tensor:
    q = m.x.view(1, 1, 5, 7)
    return F.scaled_dot_product_attention(q, m.y.view(1, 1, 5, 7), q, is_causal=True)


def _rope(m: Memory) -> Tensor:
    half = torch.cat((-m.x[:, 3:6], m.x[:, :3]), -1)
    return m.x[:, :6] * m.y[:, :6].cos() + half * m.y[:, :6].sin()


PROGRAMS: dict[str, Callable[[Memory], Any]] = {
    "linear": lambda m: F.linear(m.x, m.w, m.b),
    "linear no bias": lambda m: F.linear(m.x, m.w),
    "matmul 3d": lambda m: m.x.view(1, 5, 7) @ m.w.t(),
    "bmm": lambda m: torch.bmm(m.x.view(1, 5, 7), m.y.t().unsqueeze(0)),
    "baddbmm": lambda m: torch.baddbmm(m.x[None, :, :5], m.x[None], m.y.t()[None]),
    "rms norm by hand": lambda m: m.x * torch.rsqrt(m.x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "rms_norm": lambda m: F.rms_norm(m.x, (7,), m.y[0]),
    "layer_norm": lambda m: F.layer_norm(m.x, (7,), m.y[0], m.y[1]),
    "softmax": lambda m: (m.x.softmax(-1), m.x.log_softmax(0)),
    "silu gelu tanh": lambda m: F.silu(m.x) * F.gelu(m.y, approximate="tanh") + m.x.tanh(),
    "embedding": lambda m: F.embedding(m.ids, m.w),
    "index": lambda m: (m.cache[m.ids % 9], m.cache[:, m.pos], m.x[m.pos % 5, 1]),
    "gather scatter": lambda m: m.x.gather(1, m.ids.view(5, 1) % 7).scatter(
        1, m.pos[None] * 0, 2.0
    ),
    "index_put": lambda m: m.cache.clone().index_put_((m.ids % 9,), m.x, accumulate=True),
    "index_add": lambda m: m.cache.index_add(0, m.ids % 9, m.x),
    "where": lambda m: torch.where(m.mask, m.x, 0.0) + m.y.masked_fill(m.mask, float("-inf")),
    "argmax topk sort": lambda m: (m.x.argmax(-1), m.x.topk(3), m.x.sort(descending=True)),
    "max min": lambda m: (m.x.max(1), m.x.amin(), m.x.max(), m.x.aminmax()),
    "cumsum": lambda m: (m.ids.cumsum(0), m.x.cumsum(1), m.ids.cumsum(0, dtype=torch.int32)),
    "sums": lambda m: (m.mask.sum(), m.x.sum(0), m.ids.sum(dtype=torch.float32), m.x.var(1)),
    "logsumexp": lambda m: torch.logsumexp(m.x, -1),
    "any all": lambda m: (m.mask.any(1), m.mask.all()),
    "factories": lambda m: (torch.zeros(3), torch.ones(2, dtype=torch.int32), torch.arange(4)),
    "more factories": lambda m: (torch.full((2,), 3.5), torch.full_like(m.ids, 4), m.x.new_ones(2)),
    "arange and compare": lambda m: torch.arange(7) <= m.ids[:, None],
    "casts": lambda m: (
        m.x.to(torch.float64),
        m.bf.float(),
        m.x.bfloat16(),
        m.ids.int(),
        m.mask.long(),
    ),
    "bf16": lambda m: F.linear(m.bf, m.w.bfloat16()) * 2,
    "fp16": lambda m: m.x.half() @ m.y.half().t(),
    "clone contiguous": lambda m: (m.x.t().contiguous(), m.x.t().clone(), m.x.repeat(2, 1)),
    "cat stack": lambda m: (
        torch.cat((m.x, m.y), -1),
        torch.stack([m.x, m.y]),
        m.x.repeat_interleave(2, 1),
    ),
    "split chunk unbind": lambda m: [part * 2 for part in (*m.x.split([3, 4], 1), *m.y.unbind(0))],
    "expand": lambda m: m.b[:1].expand(4, 1) + m.x[:4],
    "setitem": _setitem_slices,
    "in place": _inplace_chain,
    "out=": _out_of_scratch,
    "attention": _attention,
    "rope": _rope,
    "one_hot": lambda m: F.one_hot(m.ids, 11),
    "einsum": lambda m: torch.einsum("ij,kj->ik", m.x, m.w),
    "scalars": lambda m: m.x * m.scalar + 2 - m.y / 3,
    "int division": lambda m: (m.ids // 3, m.ids % 4, m.ids / 2, -m.ids, m.ids << 1),
    "clamp": lambda m: m.x.clamp(-0.5, 0.5).clamp(max=m.scalar),
    "pow exp log": lambda m: (m.x.abs().pow(0.5), m.x.exp(), m.x.abs().log1p(), m.x.sigmoid()),
    "tril": lambda m: torch.ones(5, 7).tril() + m.x.triu(1),
    "complex": lambda m: torch.view_as_real(torch.polar(m.x.abs(), m.y)),
    "pad roll flip": lambda m: (F.pad(m.x, (1, 2)), m.x.roll(1, 0), m.x.flip(1)),
    "unfold": lambda m: m.x.unfold(1, 3, 2).sum(-1),
    "foreach": lambda m: torch._foreach_mul([m.x, m.y], 2.0),
    "nonzero_static": lambda m: torch.nonzero_static(m.mask, size=6),
    "searchsorted": lambda m: torch.searchsorted(m.b.sort().values, m.x),
    "in-place transpose": lambda m: m.x.clone().t_() * 1,
    "conv": lambda m: F.conv1d(m.x[None], m.y[None, :, :3]),
    "dropout in eval": lambda m: F.dropout(m.x, 0.5, training=False) + 0,
    "empty": lambda m: m.x[:0] * 2,
    "returns inputs": lambda m: (m.x, m.x[1:], None, 3),
    "same twice": lambda m: (lambda h: (h, h.t()))(m.x + 1),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_replay_equals_eager(name: str, mode: str) -> None:
    program, memory = PROGRAMS[name], Memory()
    before = {n: t.clone() for n, t in memory.tensors().items()}
    with MODES[mode]():
        graph = HostGraph(name)
        outputs = graph.capture(lambda: program(memory))
        assert_equal(before, memory.tensors())
    for step in range(3):
        memory.refresh(step)
        state = {n: t.clone() for n, t in memory.tensors().items()}
        with MODES[mode]():
            expected = program(memory)
        expected = [t.clone() for t in tensors_in(expected)]
        after = {n: t.clone() for n, t in memory.tensors().items()}
        for n, t in memory.tensors().items():
            t.copy_(state[n])
        graph.replay()
        assert_equal(dict(enumerate(expected)), dict(enumerate(tensors_in(outputs))))
        assert_equal(after, memory.tensors())


def assert_equal(expected: dict[Any, Tensor], actual: dict[Any, Tensor]) -> None:
    """Bitwise, layout included."""
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        other = actual[name]
        assert tensor.dtype is other.dtype, name
        assert torch.equal(tensor.isnan(), other.isnan()), name
        assert torch.equal(tensor.nan_to_num(), other.nan_to_num()), name


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
    step = DecodeStep(2)
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
    assert soak(900) - settled < 64  # pages: 256 kB, where one leaked logits tensor makes 360 kB
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


# Programs drawn at random: every step reads and writes tensors made by earlier steps, so that
# lifetimes, views and in-place writes meet in ways that nobody would write down.
BINARY = [torch.add, torch.sub, torch.mul, torch.maximum]
UNARY = [torch.neg, torch.cos, torch.relu, lambda t: t.softmax(-1), lambda t: t.t().contiguous()]
VIEWS = [
    lambda t: t.t(),
    lambda t: t.flip(0).view(4, 4),
    lambda t: t[1:3].repeat(2, 1),
    lambda t: t,
]
IN_PLACE = [
    lambda t, o: t.add_(o, alpha=0.5),
    lambda t, o: (t[1:].copy_(o[:-1]), t)[1],
    lambda t, o: t.t().mul_(o).t(),
    lambda t, o: t.zero_(),
]
KINDS = {"binary": BINARY, "unary": UNARY, "view": VIEWS, "in place": IN_PLACE}
STEPS = st.lists(
    st.tuples(
        st.sampled_from(list(KINDS)), st.integers(0, 4), st.integers(0, 99), st.integers(0, 99)
    ),
    min_size=3,
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, kept=st.lists(st.integers(0, 40), max_size=3))
def test_random_programs_replay_as_they_run(steps: list[Any], kept: list[int]) -> None:
    def program(memory: list[Tensor]) -> list[Tensor]:
        pool = list(memory)
        for kind, which, i, j in steps:
            function, a, b = (
                KINDS[kind][which % len(KINDS[kind])],
                pool[i % len(pool)],
                pool[j % len(pool)],
            )
            pool.append(function(a, b.clone()) if kind in ("binary", "in place") else function(a))
        return [pool[i % len(pool)] for i in kept] + [pool[-1].clone()]

    make = lambda: [torch.linspace(-1, 1, 16).view(4, 4).roll(i) for i in range(2)]  # noqa: E731
    captured, eager = make(), make()
    graph = HostGraph("random program")
    outputs = graph.capture(lambda: program(captured))
    for _ in range(2):
        expected = program(eager)
        graph.replay()
        assert_equal(dict(enumerate(expected)), dict(enumerate(outputs)))
        assert_equal(dict(enumerate(eager)), dict(enumerate(captured)))
