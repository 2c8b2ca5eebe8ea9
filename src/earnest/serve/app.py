"""The application: routers, and one shape for every error."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request

from earnest.errors import EarnestError
from earnest.serve import adapters, dashboard, feedback, health, openai, push, tinker
from earnest.serve.errors import ServeError, body
from earnest.serve.limits import RequestLimits
from earnest.serve.settings import ServeSettings
from earnest.serve.state import State
from earnest.version import __version__

log = logging.getLogger("earnest.serve")


def create_app(settings: ServeSettings) -> FastAPI:
    """The server as an ASGI application; ``app.state.earnest`` has its parts. Loading begins when it starts up."""
    state = State(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.start()
        try:
            yield
        finally:
            state.bus.close()
            await state.settle()
            state.close()

    app = FastAPI(
        title="earnest serve",
        version=__version__,
        description="Chat that learns from what its users say.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.earnest = state
    for part in (openai, feedback, adapters, push, health, dashboard):
        app.include_router(part.router(state))
    app.include_router(tinker.router(state.host, state.store), dependencies=[Depends(state.tinker_caller)])
    app.add_middleware(
        RequestLimits,
        max_body=settings.max_body,
        loopback_only=not state.keys.on,
        larger={push.UPLOAD: settings.max_upload},
    )
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(EarnestError, _known)
    app.add_exception_handler(Exception, _unknown)
    return app


def error_body(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, body, headers). What is not the request's fault is logged here and not told outside."""
    if isinstance(error, ServeError):
        return error.status, error.body(), {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if isinstance(error, EarnestError):
        return 400, body(str(error), "invalid_request_error", None, "invalid_value"), {}
    log.error("a request failed", exc_info=error)
    return 500, body("something went wrong inside the server; its log has more.", "server_error", None, None), {}


def _answer(error: Exception) -> JSONResponse:
    status, content, headers = error_body(error)
    return JSONResponse(content, status, headers)


async def _known(_: Request, error: Exception) -> JSONResponse:
    return _answer(error)


async def _unknown(_: Request, error: Exception) -> JSONResponse:
    return _answer(error)


async def _http(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return JSONResponse(body(str(error.detail), kind, None, None), error.status_code, error.headers)


async def _invalid(_: Request, error: Exception) -> JSONResponse:
    """The first mistake, with its place; never the value, which may be long, or private."""
    assert isinstance(error, RequestValidationError)
    first = min(error.errors(), key=lambda e: -len(e["loc"]), default=None)
    assert first is not None
    place = ".".join(str(p) for p in first["loc"][1:])
    message = f"{place or 'the body'}: {first['msg']}"
    if first["type"] == "extra_forbidden":
        message = f"{place}: there is no such field here; check its spelling, or leave it out"
    return JSONResponse(body(message, "invalid_request_error", place or None, first["type"]), 400)
