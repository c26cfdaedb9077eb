"""One KV cache over four ranks, on a CPU:

    torchrun --nproc-per-node 4 examples/dcp.py

Every rank holds the model and a quarter of each cache. Rank 0 takes requests; the others launch
what it launches. Nobody reads a device value to launch the next step.
"""

from __future__ import annotations

import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import graphattn
from graphattn.launch import context_parallel

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8], [1] * 40]


def tiny_llama() -> LlamaForCausalLM:
    """A random model; the same on every rank, since the seed is."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config).to(device).eval()


def main() -> None:
    """Serve three prompts and say what each rank holds."""
    size = int(os.environ.get("WORLD_SIZE", "4"))
    with (
        context_parallel(size, interleave=16, reduce="a2a") as dcp,
        graphattn.capture(tiny_llama(), max_batch=4, page_size=16, dcp=dcp) as engine,
    ):
        if not engine.leads:
            return engine.follow()
        for completion in engine.generate(PROMPTS, max_new_tokens=24):
            print(list(completion.token_ids))
        report = engine.report()
        print(f"{report.num_pages} pages of {report.page_size} per rank, {size} ranks")


if __name__ == "__main__":
    main()
