"""An engine of one's own: scheduler, sampler, page table and model in plain torch, on graphattn's
static metadata, attention and graphs.

    python examples/own_engine.py

It keeps no slot state on the device. Each step, the host writes ids and lengths into one fixed
tensor, replays the graph of the smallest bucket that holds them, and reads the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphattn import AttentionLayer, Bounds, Graph, StepBuffers

HEADS, KV_HEADS, DIM, HIDDEN, VOCAB, LAYERS, EPS = 3, 1, 16, 48, 256, 2, 1e-6
PAGE, PAGES, ROWS, MAX_LEN = 8, 40, 8, 128
BUCKETS = ((48, True), (16, True), (8, False), (2, False))  # token places, whether mixed


def linears(**shapes: tuple[int, int]) -> nn.ModuleDict:
    """Linears by name, (inputs, outputs) each."""
    return nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()})


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Rotary positions: x [T, heads, DIM] by angle [T, 1, DIM / 2]."""
    (a, b), cos, sin = x.chunk(2, dim=-1), angle.cos(), angle.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Block(nn.Module):
    """A decoder layer whose parameters have the names of a Llama checkpoint."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        q, kv = (HIDDEN, HEADS * DIM), (HIDDEN, KV_HEADS * DIM)
        self.self_attn = linears(q_proj=q, k_proj=kv, v_proj=kv, o_proj=q[::-1])
        wide = (HIDDEN, HIDDEN)
        self.mlp = linears(gate_proj=wide, up_proj=wide, down_proj=wide)
        self.input_layernorm = nn.RMSNorm(HIDDEN, eps=EPS)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, eps=EPS)

    def forward(self, x: Tensor, angle: Tensor, step: StepBuffers) -> Tensor:
        """x [T, HIDDEN] -> [T, HIDDEN]"""
        attn, mlp, y = self.self_attn, self.mlp, self.input_layernorm(x)
        q, k, v = (attn[name](y).unflatten(1, (-1, DIM)) for name in ("q_proj", "k_proj", "v_proj"))
        seen = step.attend(self.index, rotate(q, angle), rotate(k, angle), v)
        x = x + attn["o_proj"](seen.flatten(1))
        y = self.post_attention_layernorm(x)
        return x + mlp["down_proj"](F.silu(mlp["gate_proj"](y)) * mlp["up_proj"](y))


class Llama(nn.Module):
    """Plain torch, but for `step.attend`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block(i) for i in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, eps=EPS)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.register_buffer("speed", 1e4 ** -(torch.arange(0, DIM, 2) / DIM), persistent=False)

    def forward(self, ids: Tensor, step: StepBuffers) -> Tensor:
        """ids [T] -> logits [L, VOCAB] of the places that want them."""
        angle = (step.positions[:, None] * self.speed)[:, None]
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, angle, step)
        return self.lm_head(self.norm(x[step.logits_token]))


@dataclass(eq=False)
class Job:
    """A request: `tokens` grow to `length`; `pages` hold K and V of the first `cached` of them."""

    tokens: list[int]
    length: int
    temperature: float = 0.0
    cached: int = 0
    slot: int = -1
    pages: list[int] = field(default_factory=list)


class Engine:
    """Shortest job first. A job takes pages as it grows; when none is left, the job that came last
    gives its own back and starts again later."""

    def __init__(self, model: Llama, device: str) -> None:
        self.model, self.waiting, self.running = model, list[Job](), list[Job]()
        self.slots, self.pages = list(range(ROWS)), list(range(PAGES))
        bounds = Bounds(ROWS, MAX_LEN, BUCKETS[0][0], page_size=PAGE, num_pages=PAGES)
        layers = [AttentionLayer(HEADS, KV_HEADS, DIM, scale=DIM**-0.5)] * LAYERS
        self.buffers = StepBuffers.allocate(bounds, layers, dtype=torch.float32, device=device)
        # All inputs of a step are one block, so that they are one copy.
        self.host = torch.zeros(4 * ROWS + bounds.max_tokens, dtype=torch.int32)
        self.inputs = self.host.to(device)
        programs = {f"{tokens}-{mixed}": self.program(tokens, mixed) for tokens, mixed in BUCKETS}
        pools = self.buffers.pools().values()  # no row has places yet, so no page is written
        self.graphs = Graph.family(programs, device=device, untouched=pools)

    def program(self, tokens: int, mixed: bool) -> Callable[[], Tensor]:
        """The step of one bucket: lengths to tokens, all on the device."""
        step = self.buffers.narrow(tokens, mixed=mixed)
        query_len, context_len, slot, temperature = self.inputs[: 4 * ROWS].view(4, ROWS)
        ids, heat = self.inputs[4 * ROWS :][:tokens], temperature.view(torch.float32)

        def run() -> Tensor:
            step.prepare_lengths(query_len, context_len, slot_of_row=slot)
            logits = self.model(ids.long(), step)  # [L, VOCAB]: the i-th row's are the i-th
            noise = -torch.rand_like(logits).clamp(min=1e-9).log().neg().log()  # Gumbel's
            return (logits + heat[: len(logits), None] * noise).argmax(-1)

        return run

    def submit(self, job: Job) -> None:
        """Queue a job that fits in `MAX_LEN` tokens."""
        assert 0 < len(job.tokens) < job.length <= MAX_LEN, f"{job.length} tokens"
        self.waiting.append(job)

    def step(self) -> list[Job]:
        """Run one step; the jobs that finished in it."""
        rows = self.plan()
        self.write(rows)
        used, decode = sum(n for _, n in rows), all(n == 1 for _, n in rows)
        tokens, mixed = min(b for b in BUCKETS if b[0] >= used and (decode or b[1]))
        graph = self.graphs[f"{tokens}-{mixed}"]
        graph.replay()
        for (job, places), token in zip(rows, graph.outputs.tolist(), strict=False):
            job.cached += places
            if job.cached == len(job.tokens):  # else it was a chunk of a prompt
                job.tokens.append(token)
        return [self.leave(job) for job in [*self.running] if len(job.tokens) == job.length]

    def plan(self) -> list[tuple[Job, int]]:
        """Jobs with the number of their tokens that this step feeds; decode rows come first."""
        self.waiting.sort(key=lambda job: len(job.tokens))
        while self.waiting and self.slots:
            self.running.append(self.waiting.pop(0))
            self.running[-1].slot = self.slots.pop()
        rows, left = [], BUCKETS[0][0]
        for job in sorted(self.running, key=lambda job: len(job.tokens) - job.cached):
            places = min(len(job.tokens) - job.cached, left)
            if places and self.grow(job, job.cached + places):
                rows.append((job, places))
                left -= places
        return [(job, places) for job, places in rows if job.slot >= 0]

    def grow(self, job: Job, length: int) -> bool:
        """Give `job` the pages of `length` tokens; whether it still has its slot afterwards."""
        while job.slot >= 0 and len(job.pages) * PAGE < length:
            if not self.pages:
                self.waiting.append(self.leave(self.running[-1]))
            else:
                self.buffers.page_table[job.slot, len(job.pages)] = self.pages[-1]
                job.pages.append(self.pages.pop())
        return job.slot >= 0

    def leave(self, job: Job) -> Job:
        """Take back slot and pages."""
        self.running.remove(job)
        self.slots.append(job.slot)
        self.pages += job.pages
        job.slot, job.cached, job.pages = -1, 0, []
        return job

    def write(self, rows: list[tuple[Job, int]]) -> None:
        """The inputs of a step, in one copy. Rows that nobody uses have no places."""
        self.host.zero_()
        lengths, ids = self.host[: 4 * ROWS].view(4, ROWS), self.host[4 * ROWS :]
        tokens = [t for job, n in rows for t in job.tokens[job.cached : job.cached + n]]
        ids[: len(tokens)] = torch.tensor(tokens)
        for row, (job, places) in enumerate(rows):
            lengths[:3, row] = torch.tensor([places, job.cached, job.slot])
            lengths[3].view(torch.float32)[row] = job.temperature
        self.inputs.copy_(self.host)


def main() -> None:
    """Twelve jobs on eight slots, half of them at random."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = Engine(Llama().to(device), device)
    for i in range(12):
        prompt = list(f"Prompt number {i} ".encode() * (1 + i % 3))
        engine.submit(Job(prompt, len(prompt) + 8 + 4 * i, temperature=i % 2 * 0.8))
    while engine.waiting or engine.running:
        for job in engine.step():
            print(f"{len(job.tokens)} tokens, ending in {job.tokens[-4:]}")


if __name__ == "__main__":
    main()
