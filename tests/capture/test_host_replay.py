"""A replay on the host equals an eager run, bit for bit, whatever the program is made of."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphattn._capture.host import HostGraph
from graphattn._capture.storages import tensors_in

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
