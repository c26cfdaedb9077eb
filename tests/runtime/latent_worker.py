"""One rank of a process-group test of latent attention, as `dcp_worker`."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphattn
from graphattn.groups import ProcessGroup
from graphattn.models.contract import ModelStep
from tests.models.latent_families import tiny_latent
from tests.runtime.dcp_worker import JOBS, run_engine
from tests.runtime.tiny_latent import TinyLatent


class ShardedHeads(TinyLatent):
    """Query heads of the latent layers and the columns behind them over the ranks.

    Latents are replicated: the owner of a position must have it whole.
    """

    def forward(self, step: ModelStep) -> torch.Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        x = self.embed(step.input_ids) + self.position(step.positions)
        for layer, spec in enumerate(self.attention_layers):
            heads, dim = spec.num_q_heads, spec.value_dim
            own = slice(rank * heads // size, (rank + 1) * heads // size)
            q, latent = self.queries(layer, x)
            part = step.attend_latent(layer, q[:, own], latent)
            columns = self.back[layer].weight[:, own.start * dim : own.stop * dim]
            share = part.flatten(1) @ columns.T
            self.group.all_reduce([share])
            x = x + share + self.back[layer].bias
        return self.head(F.layer_norm(x[step.logits_token], x.shape[-1:]))


def sharded() -> None:
    """Queries are gathered in the width of latents, outputs scattered in the width of values."""
    options = {"num_q_heads": 4, "windows": (0, 5), "latent": (0, 1)}
    whole, model = TinyLatent(**options), ShardedHeads(**options)
    model.group = ProcessGroup(dist.group.WORLD, timeout=60.0)
    expected = [whole.generate(p, n) for p, n in JOBS]
    for reduce, backend in (("ag_rs", "host"), ("a2a", "eager")):
        dcp = graphattn.DCP(dist.group.WORLD, 3, reduce, timeout=60.0)
        tokens = run_engine(model, dcp, backend=backend)
        if tokens is not None:
            assert tokens == expected, (reduce, backend)
            print(f"equal heads {reduce} {backend}", flush=True)


def deepseek() -> None:
    """A DeepSeek of transformers on every rank: tokens equal those of one process."""
    model = tiny_latent("deepseek-v3")
    expected = None if dist.get_rank() else run_engine(model, None, backend="eager", max_seq_len=64)
    dcp = graphattn.DCP(dist.group.WORLD, 16, "a2a", timeout=60.0)
    tokens = run_engine(model, dcp, max_seq_len=64)
    if tokens is not None:
        assert tokens == expected
        print("equal deepseek", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in sys.argv[1:]:
        {"sharded": sharded, "deepseek": deepseek}[name]()
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()
