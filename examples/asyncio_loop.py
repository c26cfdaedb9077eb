"""Many coroutines share one engine:

    python examples/asyncio_loop.py

One thread owns the engine and keeps the device busy; a landed step wakes the readers of its
requests. A reader that leaves takes its request with it, a slow one holds up nobody.
"""

from __future__ import annotations

import asyncio

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import graphattn


def tiny_llama() -> LlamaForCausalLM:
    """A random model of bytes."""
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
    return LlamaForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu").eval()


async def reader(serving: graphattn.AsyncEngine, name: str, prompt: list[int]) -> None:
    """Reads to the end."""
    stream = await serving.submit(prompt, max_new_tokens=48)
    async for event in stream:
        if event.finished:
            print(f"{name}: {len(stream.request.token_ids)} tokens, {event.finish_reason}")


async def slow(serving: graphattn.AsyncEngine, name: str, prompt: list[int]) -> None:
    """Has other things to do; its events wait in the stream."""
    stream = await serving.submit(prompt, max_new_tokens=48)
    async for _ in stream:
        await asyncio.sleep(0.01)
    print(f"{name}: {len(stream.request.token_ids)} tokens, at leisure")


async def impatient(serving: graphattn.AsyncEngine, name: str, prompt: list[int]) -> None:
    """Leaves at the first token, which cancels the request."""
    async with await serving.submit(prompt, max_new_tokens=400) as stream:
        async for event in stream:
            if event.token_ids:
                break
    print(f"{name}: left after {len(stream.request.token_ids)} tokens")


async def serve(engine: graphattn.Engine) -> None:
    """Twelve clients at once on four slots, and one that is refused."""
    async with graphattn.AsyncEngine(engine) as serving:
        async with asyncio.TaskGroup() as clients:
            for i in range(12):
                client = (reader, slow, impatient)[i % 3]
                prompt = list(f"client {i} ".encode() * (1 + i))
                clients.create_task(client(serving, f"{client.__name__} {i}", prompt))
        try:
            await serving.generate([256])
        except graphattn.RequestError as error:
            print(f"refused: {error}")
        stats = await serving.call(graphattn.Engine.stats)
    print(f"{stats.tokens_emitted} tokens in {stats.steps} steps, {stats.running} running")


def main() -> None:
    """Capture, serve, free."""
    with graphattn.capture(tiny_llama(), max_batch=4) as engine:
        asyncio.run(serve(engine))


if __name__ == "__main__":
    main()
