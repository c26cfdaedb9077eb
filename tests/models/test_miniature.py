"""The trained miniature: it loads the ordinary way, its weights mean something, its script repeats.

Losses and agreement are regression values: `python -m profiles.miniature.quality` prints those of
all held-out text, in README.md beside it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from graphattn.text import encode
from graphattn.text import load as load_folder
from profiles.miniature import text
from profiles.miniature.model import CHECKPOINT, load, load_mtp, save
from profiles.miniature.quality import pieces, quality
from profiles.miniature.train import Settings, losses, train

WEIGHTS = "model.safetensors"
SHORT, LONG = pieces(128, 16), pieces(512, 4)  # the same 2,048 bytes


@pytest.fixture(scope="module")
def model() -> Any:
    return load()


@pytest.fixture(scope="module")
def mtp(model: Any) -> Any:
    return load_mtp(model)


def test_held_out_text_was_not_trained_on() -> None:
    trained, held_out = text.training_ids(), text.held_out_ids()
    assert paragraphs(trained) & paragraphs(held_out) == {""}
    assert 0.08 < len(held_out) / (len(trained) + len(held_out)) < 0.12


def paragraphs(ids: list[int]) -> set[str]:
    return {part for i in "".join(map(chr, ids)).split(chr(text.END)) for part in i.split("\n\n")}


def test_it_writes_what_it_reads(model: Any, mtp: Any, tmp_path: Path) -> None:
    """Every weight of main model and module arrives where it belongs, with nothing left over."""
    save(model, mtp, tmp_path)
    stored, written = load_file(CHECKPOINT / WEIGHTS), load_file(tmp_path / WEIGHTS)
    assert stored.keys() == written.keys()
    assert all(torch.equal(stored[name], written[name]) for name in stored)


def test_the_command_line_reads_it() -> None:
    loaded = load_folder(CHECKPOINT, torch.device("cpu"))
    assert loaded.model.dtype == torch.float32
    sample = "Grüße, \x00\n  “bytes” …"
    (ids,) = encode(loaded.tokenizer, [sample])
    assert ids == list(sample.encode())
    assert loaded.tokenizer.decode([*ids, text.END], skip_special_tokens=True) == sample
    assert loaded.model.generation_config.eos_token_id == text.END


@pytest.mark.parametrize(("ids", "loss", "agreement"), [(SHORT, 1.40, 0.80), (LONG, 1.38, 0.80)])
def test_quality_on_held_out_text(
    model: Any, mtp: Any, ids: Tensor, loss: float, agreement: float
) -> None:
    found = quality(model, mtp, ids)
    assert found.loss < loss
    assert found.agreement > agreement


def test_every_expert_works(model: Any, mtp: Any) -> None:
    """Of each routed layer, the module's included, on text that it has not seen."""
    routers = [m for m in [*model.modules(), *mtp.modules()] if hasattr(m, "top_k")]
    chosen: dict[int, Tensor] = {}
    hooks = [
        router.register_forward_hook(lambda m, _, out: chosen.__setitem__(id(m), out[2]))
        for router in routers
    ]
    quality(model, mtp, SHORT)
    for hook in hooks:
        hook.remove()
    shares = [torch.bincount(ids.flatten(), minlength=8) / ids.numel() for ids in chosen.values()]
    assert len(shares) == 3
    assert min(share.min().item() for share in shares) > 0.02


@pytest.fixture
def forwards(model: Any) -> Iterator[list[int]]:
    """Number of tokens of each forward of the main model."""
    lengths: list[int] = []
    hook = model.model.register_forward_hook(
        lambda module, args, output: lengths.append(output.last_hidden_state.shape[1])
    )
    yield lengths
    hook.remove()


def test_transformers_drafts_with_it(model: Any, forwards: list[int]) -> None:
    """The module in the file is the one that `generate(use_mtp=True)` knows: same tokens, and a
    draft per forward, most of them accepted."""
    accepted = drafted = 0
    for prompt in text.held_out_prompts(3, 48):
        ids = torch.tensor([prompt])
        plain = model.generate(ids, max_new_tokens=32, do_sample=False)
        forwards.clear()
        fast = model.generate(ids, max_new_tokens=32, do_sample=False, use_mtp=True)
        assert torch.equal(plain, fast)
        accepted += fast.shape[1] - ids.shape[1] - len(forwards)
        drafted += sum(length == 2 for length in forwards)
    assert accepted / drafted > 0.8


TINY = Settings(steps=6, tokens=64, window=16, long_window=32, long_every=3, warmup=2)


def test_training_repeats_bit_for_bit(tmp_path: Path) -> None:
    for run in ("first", "second"):
        save(*train(TINY), tmp_path / run)
    first, second = ((tmp_path / run / WEIGHTS).read_bytes() for run in ("first", "second"))
    assert first == second


def test_training_learns_both_tokens() -> None:
    ids = pieces(32, 8)
    before, after = train(Settings(steps=0)), train(TINY)
    with torch.no_grad():
        for old, new in zip(losses(*before, ids), losses(*after, ids), strict=True):
            assert new < old - 0.5
