"""The application: routers, and one shape for every error."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request

from earnest.errors import EarnestError
from earnest.serve import adapters, dashboard, feedback, generate, health, openai, push, tinker
from earnest.serve.errors import NoAdapter, body, error_response
from earnest.serve.limits import RequestLimits
from earnest.serve.settings import ServeSettings
from earnest.serve.state import State
from earnest.version import __version__

# The parts of a validation error's location that are field names; other parts are classes and members of unions.
FIELD = re.compile(r"(?!(?:str|int|float|bool|none|list|dict)$)[a-z_][a-z0-9_]*")


def create_app(settings: ServeSettings) -> FastAPI:
    """The server as an ASGI application; ``app.state.earnest`` has its parts. The model is loaded after startup."""
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
        description="Chat that learns from its users' feedback.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.earnest = state
    for part in (openai, generate, feedback, adapters, push, health, dashboard):
        app.include_router(part.router(state))
    app.include_router(tinker.router(state.host, state.store), dependencies=[Depends(state.tinker_caller)])
    app.add_middleware(
        RequestLimits,
        max_body=settings.max_body,
        body_wait=settings.body_wait,
        loopback_only=not state.keys.on,
        larger={push.UPLOAD: settings.max_upload},
    )
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(EarnestError, _known)
    return app


async def _known(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, NoAdapter):
        state = request.app.state.earnest
        caller = state.keys.caller(request)
        names = ["base", *(row.name for row in state.store.adapters())]
        error = error.suggest(name for name in names if caller.may(name, "read"))
    status, content, headers = error_response(error)
    return JSONResponse(content, status, headers)


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    message = str(error.detail)
    if error.status_code in (404, 405):
        message = f"there is no route {request.method} {request.url.path[:160]}; GET /openapi.json lists all routes."
    return JSONResponse(body(message, kind, None, None), error.status_code, error.headers)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    """The first mistake with its field, without the value, which may be long or private."""
    assert isinstance(error, RequestValidationError)
    first = min(error.errors(), key=lambda e: -len(e["loc"]))
    field = ".".join(str(p) for p in first["loc"][1:] if isinstance(p, int) or FIELD.fullmatch(p))
    message = f"{field or 'the body'}: {first['msg'].removeprefix('Value error, ')}"
    if first["type"] == "extra_forbidden":
        message = f"{field}: there is no such field here; check its spelling, or leave it out"
    elif first["type"] == "json_invalid":
        message, field = f"the body is not JSON, from character {first['loc'][-1]} on: {first['ctx']['error']}", ""
    elif not field and "json" not in request.headers.get("content-type", ""):
        message = "the body: send JSON, with the header Content-Type: application/json"
    return JSONResponse(body(message, "invalid_request_error", field or None, first["type"]), 400)
