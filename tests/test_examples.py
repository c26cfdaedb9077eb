"""The asyncio example says what happened to each of its clients."""

import asyncio

import pytest

import graphattn
from examples.asyncio_loop import serve, tiny_llama


def test_asyncio_loop(capsys: pytest.CaptureFixture[str]) -> None:
    with graphattn.capture(tiny_llama(), max_batch=4) as engine:
        asyncio.run(serve(engine))
        assert engine.stats().pages_taken == 0
    *clients, refused, total = capsys.readouterr().out.splitlines()
    read = [
        line for line in clients if line.endswith(("48 tokens, length", "48 tokens, at leisure"))
    ]
    left = [line for line in clients if line.startswith("impatient")]
    assert (len(read), len(left), len(clients)) == (8, 4, 12)
    assert refused.startswith("refused: token_ids: wanted integers in 0..255, got 256")
    assert total.endswith(", 0 running")
