"""`python -m profiles.miniature.train`: train the miniature and write its checkpoint.

Main model and MTP module learn together, as DeepSeek-V3 does: the next token, and with a smaller
weight the one after it. Seeds, thread count and algorithms are fixed, so two runs on one machine
write the same bytes; another CPU rounds differently and ends at other weights of the same quality.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DeepseekV3ForCausalLM
from transformers.modeling_layers import MtpModel

from profiles.miniature.model import CHECKPOINT, config, save
from profiles.miniature.text import training_ids


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run depends on, besides the text."""

    steps: int = 1100
    tokens: int = 1024  # that a step predicts
    window: int = 128  # of them, adjacent ones
    long_window: int = 512  # of every `long_every`-th step, so that the model looks further back
    long_every: int = 8
    learning_rate: float = 3e-3
    warmup: int = 100  # steps of rising learning rate; then a cosine down to 0
    weight_decay: float = 0.1
    mtp_weight: float = 0.3
    balance_rate: float = 1e-3  # how fast the router's bias moves towards even load
    clip: float = 1.0
    seed: int = 0
    report_every: int = 100


def train(settings: Settings) -> tuple[DeepseekV3ForCausalLM, MtpModel]:
    """Train from scratch; the same settings give the same weights on one machine."""
    torch.manual_seed(settings.seed)
    model, mtp = _fresh()
    routers = [_Router(m) for m in [*model.modules(), *mtp.layers.modules()] if _routes(m)]
    parameters = [*model.parameters(), *mtp.layers.parameters()]
    optimizer = torch.optim.AdamW(
        _groups(parameters, settings.weight_decay), betas=(0.9, 0.98), fused=True
    )
    text = torch.tensor(training_ids())
    started = time.perf_counter()
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _schedule(step, settings)
        main, ahead = losses(model, mtp, _windows(text, step, settings))
        (main + settings.mtp_weight * ahead).backward()
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        for router in routers:
            router.balance(settings.balance_rate)
        if (step + 1) % settings.report_every == 0:
            seconds = time.perf_counter() - started
            shown = f"main {main.item():.3f}, ahead {ahead.item():.3f}"
            print(f"step {step + 1}: {shown}, {seconds:.0f} s", flush=True)
    return model.eval(), mtp.eval()


def losses(model: Any, mtp: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross entropy in nats, of the next token and of the one after it.

    ids [B, W + 2]: W places predict. The MTP module gets the hidden state of place p with token
    p + 1, and rotates at p + 1, as transformers runs it.
    """
    main, ahead = logits(model, mtp, ids[:, :-1])
    return _loss(main[:, :-1], ids[:, 1:-1]), _loss(ahead, ids[:, 2:])


def logits(model: Any, mtp: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """ids [B, N] -> of the main model [B, N, vocab], for the next token of each place; of the MTP
    module [B, N - 1, vocab], for the token after that, with the true next token known."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    positions = torch.arange(1, ids.shape[1])[None]
    ahead = mtp.forward_layer(0, hidden[:, :-1], positions, None, input_ids=ids[:, 1:])
    return model.lm_head(hidden), model.lm_head(ahead)


def _loss(scores: Tensor, wanted: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, 1), wanted.flatten())


def _fresh() -> tuple[DeepseekV3ForCausalLM, MtpModel]:
    model = DeepseekV3ForCausalLM(config())
    mtp = MtpModel(model, 1)
    for parameter in mtp.layers.parameters():  # transformers leaves its experts uninitialised
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=model.config.initializer_range)
    return model.train(), mtp.train()


def _groups(parameters: list[Any], decay: float) -> list[dict[str, Any]]:
    """Matrices decay, norms do not."""
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def _schedule(step: int, settings: Settings) -> float:
    """Share of the learning rate: linear warm-up, then a cosine to 0."""
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return (1 + math.cos(math.pi * done)) / 2


def _windows(text: Tensor, step: int, settings: Settings) -> Tensor:
    """Random pieces of the text, [pieces, window + 2]."""
    is_long = (step + 1) % settings.long_every == 0
    window = settings.long_window if is_long else settings.window
    starts = torch.randint(0, len(text) - window - 1, (settings.tokens // window, 1))
    return text[starts + torch.arange(window + 2)]


def _routes(module: Any) -> bool:
    return hasattr(module, "e_score_correction_bias")


class _Router:
    """Keeps the load of a layer's experts even without a loss: their bias in the choice moves."""

    def __init__(self, gate: Any) -> None:
        self._gate = gate
        self._load = torch.zeros(gate.num_experts)
        gate.register_forward_hook(self._count)

    def _count(self, gate: Any, inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
        _, _, chosen = outputs
        self._load += torch.bincount(chosen.flatten(), minlength=len(self._load))

    def balance(self, rate: float) -> None:
        """Raise the bias of experts below the mean load, lower the others', and count anew."""
        with torch.no_grad():
            self._gate.e_score_correction_bias += rate * (self._load.mean() - self._load).sign()
        self._load.zero_()


def main() -> None:
    """Train with the default settings and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=CHECKPOINT, help="folder to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order
    torch.use_deterministic_algorithms(True)
    save(*train(Settings()), arguments.out)


if __name__ == "__main__":
    main()
