"""The Tinker API over HTTP. Handlers read requests and write answers; ``service`` carries them out.

This module does not import torch: the service is made when the host has loaded its model, and requests wait for it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from earnest.errors import EarnestError, MissingExtra
from earnest.serve.tinker.errors import TOO_DEEP, WireError
from earnest.serve.tinker.names import Path

if TYPE_CHECKING:
    from earnest.serve.host import Host
    from earnest.serve.store import Store
    from earnest.serve.tinker.futures import Promise
    from earnest.serve.tinker.service import Service

LIMIT = 64 << 20
POLL = 20.0
"""Seconds for which a request for a result is held open."""

# The SDK's own switches: plain API keys, compressed batches, a number for each copy of a sampling client.
CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "proto_compress_fwdbwd": True,
    "sample_join_sampling_session": True,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "create_model_via_load_weights": False,
}

_ODD = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
Handler = Callable[[Request], Awaitable[Response]]
Served = Callable[["Service", Request], Awaitable[Response]]


async def _read(request: Request) -> bytes:
    """The body, never more than ``LIMIT`` bytes of it."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > LIMIT:
            raise WireError(f"the body is more than {LIMIT} bytes; send it in smaller parts.", 413)
        parts.append(part)
    return b"".join(parts)


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await _read(request) or b"{}")
    except ValueError as error:
        raise WireError(f"the body is not JSON ({error}).") from error
    if not isinstance(body, dict):
        raise WireError(f"the body is a {type(body).__name__}; send a JSON object.")
    return body


@contextmanager
def _numbered(service: Service, run: object, seq: object) -> Iterator[None]:
    """Skip the number of a request that is refused here; one that may be sent again (409, 503) keeps it."""
    try:
        yield
    except (EarnestError, *_ODD) as error:
        if getattr(error, "status", 400) == 400:
            service.skip(run, seq)
        raise


def _answering_errors(handler: Handler) -> Handler:
    """Errors as answers: a client's mistake with its sentence, a missing or odd field as a 400."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except WireError as error:
            return JSONResponse({"detail": str(error)}, error.status)
        except MissingExtra as error:
            return JSONResponse({"detail": str(error)}, 501)
        except EarnestError as error:
            return JSONResponse({"detail": str(error)}, 400)
        except KeyError as error:
            return JSONResponse({"detail": f"the request lacks the field {error}."}, 400)
        except RecursionError:
            return JSONResponse({"detail": TOO_DEEP}, 400)
        except _ODD as error:
            return JSONResponse({"detail": f"the request has a field of the wrong type ({error})."}, 400)

    return answer


def _future(promise: Promise) -> Response:
    return JSONResponse({"request_id": promise.id, **promise.facts})


class LazyService:
    """The service, once the host has loaded its model."""

    def __init__(self, host: Host, store: Store) -> None:
        self.host, self.store = host, store
        self.service: Service | None = None
        host.after_load.append(self._make)

    def _make(self) -> None:
        from earnest.serve.tinker.service import Service

        self.service = Service(self.host, self.store)

    async def get(self) -> Service:
        end = time.monotonic() + self.host.settings.load_wait
        while self.service is None:
            if self.host.failure is not None or time.monotonic() > end:
                raise WireError(self.host.failure or "the model is still being loaded; try again in a moment.", 503)
            await asyncio.sleep(0.02)
        return self.service


def router(host: Host, store: Store) -> APIRouter:
    """All endpoints under /api/v1, on one service; it is closed with the app."""
    lazy = LazyService(host, store)

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        yield
        if lazy.service is not None:
            await asyncio.to_thread(lazy.service.close)

    api = APIRouter(prefix="/api/v1", include_in_schema=False, lifespan=lifespan)

    def put(method: str, path: str, handler: Handler) -> None:
        api.add_api_route(path, _answering_errors(handler), methods=[method], response_model=None)

    def on(method: str, path: str) -> Callable[[Served], Served]:
        def take(handler: Served) -> Served:
            async def handle(request: Request) -> Response:
                return await handler(await lazy.get(), request)

            put(method, path, handle)
            return handler

        return take

    _switches(put, host)
    _session_routes(on)
    _model_routes(on)
    _record_routes(on)
    return api


On = Callable[[str, str], Callable[[Served], Served]]


def _switches(put: Callable[[str, str, Handler], None], host: Host) -> None:
    """What is answered without a model."""

    def fixed(body: Any) -> Handler:
        async def handle(_: Request) -> Response:
            return JSONResponse(body)

        return handle

    async def healthz(_: Request) -> Response:
        if not host.ready():
            return JSONResponse({"detail": host.failure or "the model is being loaded."}, 503)
        return JSONResponse({"status": "ok"})

    put("GET", "/healthz", healthz)
    put("POST", "/client/config", fixed(CLIENT_CONFIG))
    put("POST", "/client/dynamic_config", fixed({"refresh_interval_sec": 3600, "sample_cancel_enabled": False}))
    put("POST", "/telemetry", fixed({"status": "accepted"}))  # read by nobody, kept nowhere


def _session_routes(on: On) -> None:
    @on("GET", "/get_server_capabilities")
    async def capabilities(service: Service, _: Request) -> Response:
        return JSONResponse(service.capabilities())

    @on("POST", "/create_session")
    async def create_session(service: Service, request: Request) -> Response:
        return JSONResponse(service.create_session(await _body(request)))

    @on("POST", "/session_heartbeat")
    async def heartbeat(service: Service, request: Request) -> Response:
        service.heartbeat(str((await _body(request))["session_id"]))
        return JSONResponse({"type": "session_heartbeat"})

    @on("POST", "/sessions/{session_id}/finish")
    async def finish(service: Service, request: Request) -> Response:
        service.finish_session(request.path_params["session_id"])
        return JSONResponse({})

    @on("POST", "/retrieve_future")
    async def retrieve(service: Service, request: Request) -> Response:
        promise = service.promises.get(str((await _body(request))["request_id"]))
        result = await promise.wait(POLL)
        if result is None:
            body = {"type": "try_again", "request_id": promise.id, "queue_state": "active"}
            return JSONResponse(body, 408)
        from earnest.serve.tinker import wire

        protobuf = wire.PROTOBUF in request.headers.get("accept", "")
        data, kind = await asyncio.to_thread(wire.write, result, protobuf=protobuf)
        promise.fetched = True
        return Response(data, media_type=kind)


def _model_routes(on: On) -> None:
    def promised(path: str, call: str) -> None:
        @on("POST", path)
        async def handle(service: Service, request: Request) -> Response:
            body = await _body(request)
            with _numbered(service, body.get("model_id"), body.get("seq_id")):
                return _future(getattr(service, call)(body))

    promised("/create_model", "create_model")
    promised("/optim_step", "optim_step")
    promised("/save_weights", "save_weights")
    promised("/save_weights_for_sampler", "save_for_sampler")
    promised("/load_weights", "load_weights")
    promised("/asample", "sample")

    async def run_pass(service: Service, request: Request) -> Response:
        from earnest.serve.tinker import wire

        sent = await _read(request)
        headers = request.headers
        body = await asyncio.to_thread(wire.decompress, sent, headers.get("content-encoding", ""), LIMIT)
        run, seq, decode = await asyncio.to_thread(wire.read_pass, body, headers.get("content-type", ""))
        with _numbered(service, run, seq):
            return _future(service.pass_(await asyncio.to_thread(decode)))

    on("POST", "/forward_backward")(run_pass)
    on("POST", "/forward")(run_pass)

    @on("POST", "/get_info")
    async def info(service: Service, request: Request) -> Response:
        return JSONResponse(service.info(str((await _body(request))["model_id"])))

    @on("POST", "/create_sampling_session")
    async def create_sampler(service: Service, request: Request) -> Response:
        return JSONResponse(service.create_sampler(await _body(request)))

    @on("POST", "/join_sampling_session")
    async def join(service: Service, request: Request) -> Response:
        number = service.samplers.join(str((await _body(request))["sampling_session_id"]))
        return JSONResponse({"type": "join_sampling_session", "client_counter": number})

    @on("GET", "/samplers/{sampler_id}")
    async def sampler(service: Service, request: Request) -> Response:
        return JSONResponse(service.sampler(request.path_params["sampler_id"]))


def _page(request: Request, found: list[Any]) -> tuple[list[Any], dict[str, int]]:
    limit, offset = (int(request.query_params.get(k, v)) for k, v in (("limit", 20), ("offset", 0)))
    if limit < 0 or offset < 0:
        raise WireError(f"limit is {limit} and offset {offset}; give numbers of 0 or more.")
    return found[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(found)}


def _record_routes(on: On) -> None:
    @on("POST", "/weights_info")
    async def weights_info(service: Service, request: Request) -> Response:
        return JSONResponse(service.weights_info(str((await _body(request))["tinker_path"])))

    @on("GET", "/training_runs")
    async def runs(service: Service, request: Request) -> Response:
        shown, cursor = _page(request, service.checkpoints.runs())
        return JSONResponse({"training_runs": [service.checkpoints.describe(r) for r in shown], "cursor": cursor})

    @on("GET", "/training_runs/{run}")
    async def run(service: Service, request: Request) -> Response:
        return JSONResponse(service.checkpoints.describe(request.path_params["run"]))

    @on("GET", "/training_runs/{run}/checkpoints")
    async def checkpoints(service: Service, request: Request) -> Response:
        return JSONResponse({"checkpoints": service.checkpoints.checkpoints(request.path_params["run"])})

    def path_of(request: Request) -> Path:
        return Path.parse(f"tinker://{request.path_params['run']}/{request.path_params['checkpoint']}")

    @on("PUT", "/training_runs/{run}/checkpoints/{checkpoint:path}/ttl")
    async def ttl(service: Service, request: Request) -> Response:
        service.checkpoints.set_ttl(path_of(request), (await _body(request)).get("ttl_seconds"))
        return Response(status_code=204)

    @on("DELETE", "/training_runs/{run}/checkpoints/{checkpoint:path}")
    async def delete(service: Service, request: Request) -> Response:
        service.checkpoints.delete(path_of(request))
        return Response(status_code=204)

    @on("GET", "/checkpoints")
    async def all_checkpoints(service: Service, request: Request) -> Response:
        found = sorted(
            (c for r in service.checkpoints.runs() for c in service.checkpoints.checkpoints(r)),
            key=lambda c: str(c["time"]),
            reverse=True,
        )
        shown, cursor = _page(request, found)
        return JSONResponse({"checkpoints": shown, "cursor": cursor})

    @on("GET", "/sessions")
    async def sessions(service: Service, request: Request) -> Response:
        return JSONResponse({"sessions": _page(request, list(service.sessions))[0]})

    @on("GET", "/sessions/{session_id}")
    async def session(service: Service, request: Request) -> Response:
        found = service.session(request.path_params["session_id"])
        return JSONResponse(
            {
                "training_run_ids": found.models,
                "sampler_ids": found.samplers,
                "user_metadata": {str(k): str(v) for k, v in found.metadata.items()} or None,
                "display_name": found.name,
            }
        )
