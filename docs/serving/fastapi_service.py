"""Read dates in a FastAPI service: BUNDLE=build/dates uvicorn --app-dir docs/serving fastapi_service:app."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field

from tfexport.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    Draining,
    InputError,
    QueueFull,
    TfexportError,
)
from tfexport.serve.app import build_app
from tfexport.serve.config import ServingConfig
from tfexport.serve.engine import Engine
from tfexport.serve.metrics import Metrics

STATUS = {
    ConfigError: 400,
    InputError: 400,
    QueueFull: 429,
    Cancelled: 499,  # nobody reads it: the client has gone
    Draining: 503,
    DeadlineExceeded: 504,
}
metrics = Metrics()
config = ServingConfig(slots=16, max_waiting=64, timeout_s=10)
engine = Engine(os.environ["BUNDLE"], config, observer=metrics.observer("dates"))


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Load the bundle before the first request, and finish those that were accepted before the process ends."""
    async with engine:
        yield


app = FastAPI(lifespan=lifespan)
# All endpoints of tfexport serve beside your own, where you want them: /tfexport/readyz, /tfexport/metrics, …
app.mount("/tfexport", build_app({"dates": engine}, metrics=metrics))


class Question(BaseModel):
    """What a client asks."""

    text: str = Field(max_length=1000)
    num_beams: int = Field(default=1, ge=1, le=4)
    max_new_tokens: int | None = Field(default=None, ge=1, le=64)
    timeout_s: float | None = Field(default=None, gt=0)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `Engine.submit`."""
        return self.model_dump(exclude_none=True)


@app.exception_handler(TfexportError)
async def on_error(request: Request, error: TfexportError) -> JSONResponse:
    """Answer a request that the engine does not."""
    status = next((status for kind, status in STATUS.items() if isinstance(error, kind)), 500)
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, QueueFull) else None
    return JSONResponse({"error": str(error)}, status, headers)


@app.post("/read")
async def read(question: Question, request: Request) -> list[str]:
    """Answer when all is generated; a client that goes away frees its slots."""
    generation = engine.submit(**question.arguments())

    async def cancel_when_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        generation.cancel()

    watcher = asyncio.create_task(cancel_when_gone())
    try:
        return [answer.text for answer in await generation]
    finally:
        watcher.cancel()


@app.post("/stream")
async def stream(question: Question) -> StreamingResponse:
    """Answer as server-sent events; Starlette stops reading, which cancels, when the client goes away."""
    generation = engine.submit(stream=True, **question.arguments())  # raises before there is a status of 200

    async def events() -> AsyncIterator[str]:
        try:
            async for piece in generation:
                yield f"data: {json.dumps({'piece': piece}, ensure_ascii=False)}\n\n"
        except TfexportError as error:
            yield f"event: error\ndata: {json.dumps({'error': str(error)})}\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
