"""The server example without sockets: clients that leave at any moment, an engine that fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from examples.server import make_app
from graphattn.engine import Engine
from tests.runtime.lagging_stream import LaggingStream
from tests.runtime.serving import make_engine
from tests.runtime.tiny_model import TinyModel
from tests.tiny_llama import byte_tokenizer


class Client:
    """One request; leaves after `parts` messages, or looks at the connection, None never."""

    def __init__(self, parts: int | None = None, *, streamed: bool) -> None:
        self._parts = parts
        fields = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 90, "stream": streamed}
        self._body: bytes | None = json.dumps({"temperature": 0, **fields}).encode()
        self._streamed = streamed
        self._looks = 0
        self._left = asyncio.Event()
        self.status = 0
        self.text = ""

    async def ask(self, app: Any, state: Any) -> Client:
        """Itself, with the answer."""
        scope = {
            "type": "http",
            "asgi": {"spec_version": "2.3"},
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "state": dict(state),
        }
        self._leave_at(0)
        await app(scope, self._receive, self._send)
        return self

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body}
        if not self._streamed:
            self._looks += 1
            self._leave_at(self._looks - 1)
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        self.text += message.get("body", b"").decode()
        await asyncio.sleep(0)  # as on a full socket: the client leaves meanwhile
        if self._streamed:
            self._leave_at(self.text.count("\n\n"))

    def _leave_at(self, parts: int) -> None:
        if self._parts is not None and parts >= self._parts:
            self._left.set()


def serve(engine: Engine, body: Callable[[Any, Any], Any]) -> None:
    """`body(app, state)` between startup and shutdown."""

    async def main() -> None:
        app = make_app(engine, byte_tokenizer(), "tiny")
        async with asyncio.timeout(60), app.router.lifespan_context(app) as state:
            await body(app, state)

    with engine:
        asyncio.run(main())


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("parts", [0, 1, 4])
def test_a_client_that_leaves_takes_its_request_along(streamed: bool, parts: int) -> None:
    async def body(app: Any, state: Any) -> None:
        client = await Client(parts, streamed=streamed).ask(app, state)
        stats = await state["serving"].call(Engine.stats)
        assert (stats.running, stats.waiting, stats.requests_finished) == (0, 0, 1)
        assert stats.tokens_emitted < 60
        assert client.status == (200 if streamed else 499)

    serve(make_engine(TinyModel()), body)


@pytest.mark.parametrize("streamed", [True, False])
def test_an_engine_that_fails_is_told_to_its_clients(
    streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(TinyModel(), stream=LaggingStream(pace=3))
    launch = engine._runner.launch

    def fails(*step: Any) -> None:
        if engine.stats().steps == 9:
            raise MemoryError("injected")
        launch(*step)

    monkeypatch.setattr(engine._runner, "launch", fails)

    async def body(app: Any, state: Any) -> None:
        client = await Client(streamed=streamed).ask(app, state)
        assert client.status == (200 if streamed else 500)
        last = client.text.removesuffix("\n\n").split("data: ")[-1]
        assert "MemoryError: injected" in json.loads(last)["error"]["message"]
        client = await Client(streamed=streamed).ask(app, state)
        assert client.status == 503
        assert "MemoryError: injected" in json.loads(client.text)["error"]["message"]

    serve(engine, body)
