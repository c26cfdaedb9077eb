"""The server example: the official client against a process, and what must not harm it."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

import graphattn
from examples.server import MAX_BODY
from graphattn.engine import Engine
from graphattn.text import Loaded, TextStream, load
from profiles.miniature.model import CHECKPOINT

MODEL = "miniature"
TEMPLATE = """{% for m in messages %}{% if m["role"] == "critic" %}
{{ raise_exception("no critics") }}{% endif %}{{ m["content"] }} {% endfor %}"""
MAX_QUEUE = 32
SECONDS = 120  # a bound on what takes a few


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The miniature, with a chat template."""
    folder = tmp_path_factory.mktemp("model") / MODEL
    shutil.copytree(CHECKPOINT, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    return load(folder, torch.device("cpu"))


@pytest.fixture(scope="module")
def engine(loaded: Loaded) -> Iterator[Engine]:
    with graphattn.capture(loaded.model, 8) as engine:
        yield engine


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    """Of a server that is interrupted in the end, and says nothing of errors until then."""
    log = folder.parent / "log"
    options = ["--model", str(folder), "--port", "0", "--max-queue", str(MAX_QUEUE)]
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "examples/server.py", *options],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=output,
        )
    try:
        yield listening(server, log)
        server.send_signal(signal.SIGINT)
        assert server.wait(SECONDS) == 0
        assert "Traceback" not in log.read_text()
    finally:
        server.kill()
        server.wait()


def listening(server: subprocess.Popen[bytes], log: Path) -> int:
    end = time.monotonic() + SECONDS
    while server.poll() is None and time.monotonic() < end:
        if found := re.search(r"running on http://127\.0\.0\.1:(\d+)", log.read_text()):
            return int(found[1])
        time.sleep(0.05)
    raise AssertionError(log.read_text())


@pytest.fixture
def client(port: int) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(**connection(port)) as client:
        yield client


def connection(port: int) -> dict[str, Any]:
    url = f"http://127.0.0.1:{port}/v1"
    return {"base_url": url, "api_key": "none", "max_retries": 0, "timeout": SECONDS}


def expected(engine: Engine, loaded: Loaded, prompt: str, **fields: Any) -> tuple[str, int]:
    """The engine's own text and its number of tokens."""
    (done,) = engine.generate([loaded.tokenizer(prompt)["input_ids"]], **fields)
    return TextStream(loaded.tokenizer).feed(done.token_ids), len(done.token_ids)


async def read(
    client: openai.AsyncOpenAI, prompt: str, *, chat: bool, **fields: Any
) -> tuple[str, int]:
    """Text and number of tokens of a streamed answer, whose chunks are checked."""
    options: Any = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}}
    if chat:
        message: Any = {"role": "user", "content": prompt}
        chunks = await client.chat.completions.create(messages=[message], **options, **fields)
    else:
        chunks = await client.completions.create(prompt=prompt + " ", **options, **fields)
    *parts, last = [chunk async for chunk in chunks]
    choices = [choice for part in parts for choice in part.choices]
    reasons = [choice.finish_reason for choice in choices]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert reasons[-1] in ("stop", "length")
    assert last.usage.prompt_tokens == len(prompt) + 1  # the template ends with a space
    texts = [choice.delta.content if chat else choice.text for choice in choices]
    return "".join(texts), last.usage.completion_tokens


def test_32_streams_at_once(port: int, engine: Engine, loaded: Loaded) -> None:
    """Greedy and sampled, completions and chats, each with the engine's own tokens."""
    words = ["import", "class", "yield", "while", "return", "lambda", "object", "module"]
    prompts = [f"The {words[i % 8]} statement {'is ' * (i % 5)}" for i in range(32)]
    sampled = [{"temperature": 0.8, "top_p": 0.9, "seed": i} for i in range(32)]
    fields: list[Any] = [{"temperature": 0.0} if i % 2 else sampled[i] for i in range(32)]

    async def main() -> list[tuple[str, int]]:
        async with openai.AsyncOpenAI(**connection(port)) as client:
            readers = (
                read(client, prompts[i], chat=i % 4 < 2, max_tokens=6 + i % 17, **fields[i])
                for i in range(32)
            )
            return await asyncio.gather(*readers)

    answers = asyncio.run(main())
    requests = [
        engine.submit(list(f"{prompts[i]} ".encode()), max_new_tokens=6 + i % 17, **fields[i])
        for i in range(32)
    ]
    while engine.busy:
        engine.step()
        engine.poll()
    texts = [TextStream(loaded.tokenizer).feed(request.token_ids) for request in requests]
    assert answers == [(t, len(r.token_ids)) for t, r in zip(texts, requests, strict=True)]
    assert len(set(answers)) > 16


def test_whole_answers(client: openai.OpenAI, engine: Engine, loaded: Loaded) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    text, count = expected(engine, loaded, "A function is ", max_new_tokens=16)
    for prompt in ("A function is ", list(b"A function is ")):
        answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0)
        assert answer.choices[0].text == text
        assert answer.usage is not None
        assert answer.usage.total_tokens == 14 + count
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "A"}, {"role": "user", "content": "function is"}],
        temperature=0,
        max_completion_tokens=16,
    )
    assert chat.choices[0].message.role == "assistant"
    assert chat.choices[0].message.content == text


def test_an_answer_stops_at_the_end_of_the_text(
    client: openai.OpenAI, engine: Engine, loaded: Loaded
) -> None:
    """The end token counts as a token and has no text."""
    fields: dict[str, Any] = {"temperature": 2.0, "seed": 1}
    (done,) = engine.generate([[65]], max_new_tokens=500, **fields)
    assert done.finish_reason is graphattn.FinishReason.STOP
    answer = client.completions.create(model=MODEL, prompt="A", max_tokens=500, **fields)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == TextStream(loaded.tokenizer).feed(done.token_ids[:-1])
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(done.token_ids)


def post(port: int, path: str, body: bytes, kind: str = "application/json") -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request("POST", path, body, {"Content-Type": kind})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


GOOD = {"model": MODEL, "prompt": "x", "max_tokens": 2}
CHAT = {"model": MODEL, "max_tokens": 2}


REFUSED: list[tuple[bytes | dict[str, Any], int, str]] = [
    (b"", 400, "no JSON object"),
    (b"{", 400, "no JSON object"),
    (b"\xff\xfe{}", 400, "no JSON object"),
    (b"[" * 100_000, 400, "no JSON object"),
    (b"[]", 400, "no JSON object"),
    (b"1", 400, "no JSON object"),
    (b" " * MAX_BODY + b"{}", 413, "more than 1048576 bytes"),
    ({**GOOD, "model": "other"}, 404, "'miniature' only"),
    ({**GOOD, "model": 3}, 400, "model: wanted str"),
    ({**GOOD, "stream": "yes"}, 400, "stream: wanted bool"),
    ({**GOOD, "stream_options": 1}, 400, "stream_options: wanted dict"),
    ({**GOOD, "best_of": 2}, 400, "not supported: best_of"),
    ({**GOOD, "prompt": None}, 400, "prompt"),
    ({**GOOD, "prompt": ""}, 400, "at least one token"),
    ({**GOOD, "prompt": 7}, 400, "token_ids"),
    ({**GOOD, "prompt": {}}, 400, "token_ids"),
    ({**GOOD, "prompt": ["a", "b"]}, 400, "integers in 0..263"),
    ({**GOOD, "prompt": [1, -1]}, 400, "integers in 0..263"),
    ({**GOOD, "prompt": [1, True]}, 400, "integers in 0..263"),
    ({**GOOD, "prompt": "\ud800"}, 400, "prompt"),
    ({**GOOD, "prompt": "x" * 512}, 400, "max_seq_len = 512"),
    ({**GOOD, "max_tokens": 0}, 400, "max_new_tokens"),
    ({**GOOD, "max_tokens": "9"}, 400, "max_new_tokens"),
    ({**GOOD, "temperature": "hot"}, 400, "temperature"),
    ({**GOOD, "temperature": 10**400}, 400, "temperature"),
    ({**GOOD, "temperature": float("nan")}, 400, "temperature"),
    ({**GOOD, "top_p": [1]}, 400, "top_p"),
    ({**GOOD, "seed": -1}, 400, "seed"),
    ({**CHAT}, 400, "messages"),
    ({**CHAT, "messages": "hello"}, 400, "messages"),
    ({**CHAT, "messages": []}, 400, "messages"),
    ({**CHAT, "messages": ["hello"]}, 400, "messages"),
    ({**CHAT, "messages": [{"role": "user"}]}, 400, "content"),
    ({**CHAT, "messages": [{"role": "user", "content": [1]}]}, 400, "content"),
    ({**CHAT, "messages": [{"role": "critic", "content": "x"}]}, 400, "no critics"),
]


def test_what_is_refused(port: int) -> None:
    """In one test: each process that runs a part of this module starts a server."""
    for body, status, said in REFUSED:
        chat = isinstance(body, dict) and "prompt" not in body
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = post(port, "/v1/chat/completions" if chat else "/v1/completions", data)
        assert answer[0] == status, body
        assert said in answer[1]["error"]["message"], body


def test_other_paths_methods_and_kinds(port: int, client: openai.OpenAI) -> None:
    assert post(port, "/v1/nothing", b"{}")[0] == 404
    assert post(port, "/v1/models", b"{}")[0] == 405
    assert post(port, "/v1/completions", b"{}", "text/plain")[0] == 415
    with pytest.raises(openai.NotFoundError, match="'miniature' only"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="top_p: wanted"):
        client.completions.create(model=MODEL, prompt="x", top_p=7)


def open_many(client: openai.OpenAI, streams: list[Any]) -> None:
    """Long answers, more than the server takes."""
    fields: Any = {"model": MODEL, "prompt": "Go", "max_tokens": 500, "stream": True}
    for _ in range(100):
        streams.append(client.completions.create(**fields))


def test_a_full_queue_and_clients_that_leave(
    client: openai.OpenAI, engine: Engine, loaded: Loaded
) -> None:
    """Many wait; then all leave, and whoever comes finds their places."""
    text, _ = expected(engine, loaded, "A name ", max_new_tokens=9)
    fields: Any = {"model": MODEL, "prompt": "A name ", "max_tokens": 9, "temperature": 0}
    for _ in range(2):
        streams: list[Any] = []
        with pytest.raises(openai.RateLimitError, match="its bound"):
            open_many(client, streams)
        assert len(streams) >= MAX_QUEUE
        assert next(iter(streams[0])).model == MODEL
        for stream in streams:
            stream.close()
        assert retry(lambda: client.completions.create(**fields)).choices[0].text == text


def retry(call: Callable[[], Any]) -> Any:
    """The server has to notice first that clients have left."""
    end = time.monotonic() + SECONDS
    while True:
        try:
            return call()
        except openai.RateLimitError:
            assert time.monotonic() < end
            time.sleep(0.05)
