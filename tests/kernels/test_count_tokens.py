"""`count_tokens` against a loop over tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import graphattn.kernels.count_tokens as count_tokens_triton
from graphattn.kernels import ops
from graphattn.kernels.count_tokens_ref import count_tokens_ref
from graphattn.kernels.ops import IN_PROMPT

Count = Callable[..., None]
TRITON_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # cpu: the interpreter
POISON = 2**30 + 5  # an id out of range, wherever nothing may be read

each_implementation = pytest.mark.parametrize(
    ("count_tokens", "device"),
    [(ops.count_tokens, "cpu"), (count_tokens_triton.count_tokens, TRITON_DEVICE)],
    ids=["cpu", "triton"],
)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small vocabularies and prompts take several iterations too."""
    monkeypatch.setattr(count_tokens_triton, "BLOCK", 32)


def ints(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def padded(rows: Sequence[Sequence[int]], width: int) -> Tensor:
    return ints([[*row, *[POISON] * (width - len(row))] for row in rows])


def run(count_tokens: Count, arguments: Sequence[Tensor], device: str = "cpu") -> Tensor:
    """The occurrences after the call; its inputs stay as they were."""
    before = [argument.to(device) for argument in arguments]
    after = [argument.clone() for argument in before]
    count_tokens(*after)
    for was, now in zip(before[:-1], after[:-1], strict=True):
        assert torch.equal(was, now)
    return after[-1].cpu()


def random_arguments(seed: int, slots: int, vocab: int, places: int, max_len: int) -> list[Tensor]:
    """Slots that are admitted, that emit, that do both, or nothing; few distinct tokens."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.choice([0, 3, vocab - 1, rng.randrange(vocab)]) for _ in range(count)]

    prompts = [tokens(rng.randint(1, max_len)) for _ in range(slots)]
    emitted = [tokens(rng.randint(0, places)) for _ in range(slots)]
    rows = rng.sample(range(slots), slots)
    rows[slots // 2] = -1
    emitted[slots // 2] = []
    occurrences = torch.randint(0, 5, (slots, vocab), dtype=torch.int32)
    occurrences[:, ::3] += IN_PROMPT
    return [
        ints([rng.choice([-1, 7]) for _ in range(slots)]),
        ints([len(prompt) for prompt in prompts]),
        ints([rng.randint(0, len(prompt)) for prompt in prompts]),
        padded(prompts, max_len),
        ints(rows),
        ints([len(row) for row in emitted]),
        padded(emitted, places),
        occurrences,
    ]


@each_implementation
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("slots", "vocab", "places", "max_len"), [(1, 1, 1, 1), (5, 37, 3, 70), (9, 160, 6, 33)]
)
def test_equals_the_oracle(
    count_tokens: Count, device: str, slots: int, vocab: int, places: int, max_len: int
) -> None:
    arguments = random_arguments(vocab, slots, vocab, places, max_len)
    expected = run(count_tokens_ref, arguments)
    assert torch.equal(run(count_tokens, arguments, device), expected)


@each_implementation
def test_by_hand(count_tokens: Count, device: str) -> None:
    """A token emitted several times in a step counts as often: elsewhere only the last accepted
    one reached the penalties. A slot that is admitted anew keeps nothing of its last request; what
    a request emitted before it was preempted counts as emitted.
    """
    arguments = [
        ints([-1, 4, -1, -1]),
        ints([POISON, 6, POISON, POISON]),
        ints([POISON, 3, POISON, POISON]),
        padded([[], [2, 5, 2, 1, 2, 1, 4], [], []], 7),  # of slot 1; the last is not its
        ints([2, 1, -1, 0]),
        ints([3, 2, 0, 0]),
        padded([[4, 4, 0], [3, 3], [], []], 3),
        ints([[9, 0, 0, 0, 0, 0], [8] * 6, [IN_PROMPT, 0, 0, 0, 1, 0], [1, 2, 3, 4, 5, 6]]),
    ]
    assert run(count_tokens, arguments, device).tolist() == [
        [9, 0, 0, 0, 0, 0],
        [0, 2, IN_PROMPT + 1, 0, 0, IN_PROMPT],
        [IN_PROMPT + 1, 0, 0, 0, 3, 0],
        [1, 2, 3, 4, 5, 6],
    ]


def test_other_layouts_are_refused() -> None:
    arguments = random_arguments(0, 3, 8, 2, 4)
    arguments[-1] = arguments[-1].T.contiguous().T
    with pytest.raises(ValueError, match="occurrences: wanted contiguous"):
        count_tokens_triton.count_tokens(*arguments)


@pytest.mark.gpu
def test_op_on_cuda() -> None:
    arguments = random_arguments(1, 64, 151_936, 6, 9_000)
    expected = run(ops.count_tokens, arguments)
    assert torch.equal(run(ops.count_tokens, arguments, "cuda"), expected)
