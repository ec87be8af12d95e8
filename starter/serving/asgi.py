"""The same API for ASGI servers, on the packages of the extra ``server``.

    uvicorn "starter.serving.asgi:make_app" --factory          with P07_FIXTURE or P07_CHECKPOINT in the environment

    engine = InferenceEngine.from_checkpoint(PATH)             or from a program of your own
    engine.start()
    uvicorn.run(application(Api(engine, Settings("mine"))))

Routes, errors and token events are those of ``api.py``; the ASGI server reads HTTP and bounds connections instead of
``wire.py`` and ``server.py``. No thread waits for a generation: the event loop is woken by the engine.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from starter.engine import InferenceEngine
from starter.errors import EngineError, SchemaError
from starter.schema import load_scenario
from starter.serving.answers import Answer, HttpRequest, Work
from starter.serving.api import Api, Settings
from starter.serving.generation import Item, Source
from starter.serving.problems import ApiError, as_api_error
from starter.serving.wire import Limits

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"]


async def batches(source: Source[Item]) -> AsyncIterator[list[Item]]:
    """``Source.batches`` for an event loop."""
    loop, news = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop was closed, so nobody waits
            loop.call_soon_threadsafe(news.set)

    with source.waking(wake):
        while True:
            news.clear()
            if items := source.take():
                yield items
            elif source.ended:
                return
            else:
                left = source.seconds_left
                with suppress(asyncio.TimeoutError):  # then seconds_left raises
                    await asyncio.wait_for(news.wait(), left)


async def _events(work: Work) -> AsyncIterator[bytes]:
    """The server-sent events of a stream."""
    try:
        async for batch in batches(work.source):
            for part in work.parts(batch):
                yield part
        closing = work.last_parts()
    except (EngineError, ApiError) as error:
        closing = work.parts_of(error)
    for part in closing:
        yield part


class _Stream(StreamingResponse):
    """Cancels its requests when it ends, however that is: also where the client left before the first event, and the
    iterator was never begun."""

    def __init__(self, work: Work) -> None:
        super().__init__(_events(work), media_type="text/event-stream",
                         headers={**work.headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._source = work.source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._source:
            await super().__call__(scope, receive, send)


async def _whole(work: Work, request: Request) -> Answer:
    """The whole answer; a client that goes away meanwhile ends the generation."""
    with work.source:
        watch = asyncio.create_task(_until_gone(request, work.source.cancel))
        try:
            async for batch in batches(work.source):
                work.add(batch)
            return work.answer()
        except (EngineError, ApiError) as error:
            return Answer.of(as_api_error(error))
        finally:
            watch.cancel()


async def _until_gone(request: Request, gone: Callable[[], None]) -> None:
    """The body has been read, so the next message says that the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    gone()


def application(api: Api, limits: Limits | None = None, close: Callable[[], None] = lambda: None) -> Starlette:
    """An ASGI application over an engine whose own thread runs. ``close`` is called when the server ends."""
    most = (limits or Limits()).body

    async def answer(request: Request) -> Response:
        try:
            body = await _body(request, most)
        except ApiError as error:
            return _response(Answer.of(error))
        except ClientDisconnect:
            return Response(status_code=400)
        headers = {name.lower(): value for name, value in request.headers.items()}
        path = request.scope.get("raw_path", request.url.path.encode()).decode("latin-1").partition("?")[0]
        outcome = await run_in_threadpool(api.handle, HttpRequest(request.method, path, headers, body))
        if isinstance(outcome, Answer):
            return _response(outcome)
        if outcome.streams:
            return _Stream(outcome)
        return _response(await _whole(outcome, request))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        close()

    return Starlette(routes=[Route("/{path:path}", answer, methods=METHODS)], lifespan=lifespan)


async def _body(request: Request, most: int) -> bytes:
    received = b""
    async for part in request.stream():
        received += part
        if len(received) > most:
            raise ApiError(413, f"the body may have {most} bytes", code="body_too_large",
                           headers={"Connection": "close"})
    return received


def _response(answer: Answer) -> Response:
    headers = dict(answer.headers)
    if answer.status != 204:
        headers["Content-Type"] = answer.content_type
    return Response(answer.body, answer.status, headers)


def make_app() -> Starlette:
    """For ``uvicorn --factory``: the model that P07_FIXTURE or P07_CHECKPOINT names, with P07_API_KEY and
    P07_MODEL_NAME. SchemaError if neither is set."""
    fixture, checkpoint = os.environ.get("P07_FIXTURE"), os.environ.get("P07_CHECKPOINT")
    if fixture:
        engine = InferenceEngine.from_scenario(load_scenario(fixture), clock=time.monotonic, keep_events=0)
    elif checkpoint:
        engine = InferenceEngine.from_checkpoint(checkpoint, clock=time.monotonic, keep_events=0)
    else:
        raise SchemaError("set P07_FIXTURE to a scenario, or P07_CHECKPOINT to a model")
    engine.start()
    name = os.environ.get("P07_MODEL_NAME") or Path(engine.metrics().model_name).name or "model"
    return application(Api(engine, Settings(name, os.environ.get("P07_API_KEY") or None)), close=engine.close)
