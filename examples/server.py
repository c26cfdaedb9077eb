"""One model behind an OpenAI-shaped API; needs `pip install ".[server]"`:

    python examples/server.py --model FOLDER
    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"model": "FOLDER", "prompt": "The sky is", "stream": true}'

Answers are whole or streamed; a client that leaves takes its request with it; fields that are not
known are refused. There is no authentication: it listens on loopback unless `--host` is given.
"""

from __future__ import annotations

import argparse
import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import graphattn
from graphattn import EngineClosedError, FinishReason, QueueFullError, RequestError
from graphattn.text import TextStream, load

MAX_BODY = 1 << 20  # bytes; the prompt's own limit is the engine's max_seq_len
SAMPLING = ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty")
LIMITS = ("max_completion_tokens", "max_tokens")
FIELDS = {"model", "messages", "prompt", "stream", "stream_options", *LIMITS, *SAMPLING}
STATUS = {RequestError: 400, QueueFullError: 429, EngineClosedError: 503, ClientDisconnect: 400}
Json = dict[str, Any]


async def read_fields(request: Request) -> Json:
    """The fields of the body that are not null."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise HTTPException(415, "Content-Type: wanted application/json")
    body = b""
    async for part in request.stream():
        if len(body := body + part) > MAX_BODY:
            raise HTTPException(413, f"the body has more than {MAX_BODY} bytes")
    try:
        fields = {name: value for name, value in json.loads(body).items() if value is not None}
    except (ValueError, RecursionError, AttributeError) as error:
        raise HTTPException(400, f"the body is no JSON object: {error}") from error
    if unknown := sorted(fields.keys() - FIELDS):
        raise HTTPException(400, f"not supported: {', '.join(unknown)[:200]}")
    for name, kind in (("model", str), ("stream", bool), ("stream_options", dict)):
        if not isinstance(fields.setdefault(name, kind()), kind):
            raise HTTPException(400, f"{name}: wanted {kind.__name__}")
    return fields


def encode(tokenizer: Any, fields: Json, *, chat: bool) -> Any:
    """Token ids of a chat's `messages`, or of a `prompt`, which is text or has them already."""
    if chat and tokenizer.chat_template is None:
        raise HTTPException(400, "the model has no chat template; use /v1/completions")
    try:
        if not chat:
            given = fields["prompt"]
            return tokenizer(given)["input_ids"] if isinstance(given, str) else given
        messages = [{k: m[k] + "" for k in ("role", "content")} for m in fields["messages"]]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    except (TypeError, ValueError, LookupError, jinja2.TemplateError) as error:
        raise HTTPException(400, f"prompt, or role and content of messages: {error!r}") from error


class Answer(NamedTuple):
    """The events of one request, and what goes around them."""

    stream: graphattn.EventStream
    text: TextStream
    head: Json
    chat: bool

    async def pieces(self) -> AsyncIterator[tuple[str, str | None]]:
        """Text of each event, and why the request ended. A stop token has no text."""
        async for event in self.stream:
            if event.error is not None:
                raise HTTPException(500, event.error)
            stopped = event.finish_reason is FinishReason.STOP
            yield self.text.feed(event.token_ids[: -1 if stopped else None]), event.finish_reason

    def body(self, holder: str, text: str, reason: str | None, **role: str) -> Json:
        """With the only choice: plain text, or the message of a chat in its `holder`."""
        held = {holder: role | {"content": text}} if self.chat else {"text": text}
        return self.head | {"choices": [held | {"index": 0, "finish_reason": reason}]}

    def usage(self) -> Json:
        """Of the ended request."""
        request = self.stream.request
        counts = {"prompt_tokens": len(request.prompt), "total_tokens": request.known_len}
        return {"usage": counts | {"completion_tokens": len(request.token_ids)}}

    async def whole(self, request: Request) -> Response:
        """All at once."""
        text, reason = "", None
        async with self.stream:
            async for piece, why in self.pieces():
                text, reason = text + piece, why
                if await request.is_disconnected():
                    return Response(status_code=499)
        return JSONResponse(self.body("message", text, reason, role="assistant") | self.usage())

    async def events(self, *, usage: bool) -> AsyncIterator[str]:
        """Data of server-sent events."""
        role = {"role": "assistant"}
        try:
            async for text, reason in self.pieces():
                yield json.dumps(self.body("delta", text, reason, **role))
                role = {}
            if usage:
                yield json.dumps(self.head | {"choices": []} | self.usage())
            yield "[DONE]"
        except HTTPException as error:
            yield json.dumps(error_body(error))


async def complete(request: Request, *, chat: bool) -> Response:
    """Either endpoint."""
    app, fields = request.app.state, await read_fields(request)
    if fields["model"] != app.model:
        raise HTTPException(404, f"model: this server has {app.model!r} only")
    prompt = encode(app.tokenizer, fields, chat=chat)
    limit = next((fields[name] for name in LIMITS if name in fields), 1 << 30 if chat else 16)
    sampling = {"temperature": 1.0} | {k: fields[k] for k in SAMPLING if k in fields}
    stream = await request.state.serving.submit(prompt, max_new_tokens=limit, **sampling)
    kind = ("chat.completion" + ".chunk" * fields["stream"]) if chat else "text_completion"
    head = {"id": uuid.uuid4().hex, "object": kind, "created": int(time.time())}
    answer = Answer(stream, TextStream(app.tokenizer), head | {"model": app.model}, chat)
    if not fields["stream"]:
        return await answer.whole(request)
    events = answer.events(usage=fields["stream_options"].get("include_usage") is True)
    lines = (f"data: {event}\n\n" async for event in events)
    left = BackgroundTask(stream.aclose)  # also of a client that left before its first event
    return StreamingResponse(lines, media_type="text/event-stream", background=left)


def error_body(error: HTTPException) -> Json:
    """As the clients of this API read it."""
    return {"error": {"message": error.detail, "type": None, "param": None, "code": None}}


async def refuse(request: Request, error: Exception) -> Response:
    """Every error has a status and a body."""
    if not isinstance(error, HTTPException):
        error = HTTPException(STATUS[type(error)], str(error))
    return JSONResponse(error_body(error), error.status_code)


def make_app(engine: graphattn.Engine, tokenizer: Any, model: str) -> Starlette:
    """The application that serves `engine` under the name `model`."""
    card = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "graphattn"}

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[Json]:
        async with graphattn.AsyncEngine(engine) as serving:
            yield {"serving": serving}

    routes = [
        Route("/v1/models", lambda _: JSONResponse({"object": "list", "data": [card]})),
        Route("/v1/completions", partial(complete, chat=False), methods=["POST"]),
        Route("/v1/chat/completions", partial(complete, chat=True), methods=["POST"]),
    ]
    errors = dict.fromkeys((*STATUS, HTTPException), refuse)
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=errors)
    app.state.tokenizer, app.state.model = tokenizer, model
    return app


def main() -> None:
    """Load, capture, serve until interrupted."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True, help="a transformers folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--max-queue", type=int, default=256)
    parser.add_argument("--max-seq-len", type=int, help="default: what the model and memory allow")
    given = parser.parse_args()
    loaded = load(given.model, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    limits = {name: getattr(given, name) for name in ("max_batch", "max_queue", "max_seq_len")}
    with graphattn.capture(loaded.model, **limits) as engine:
        app = make_app(engine, loaded.tokenizer, given.model.name)
        uvicorn.run(app, host=given.host, port=given.port, timeout_graceful_shutdown=5)


if __name__ == "__main__":
    main()
