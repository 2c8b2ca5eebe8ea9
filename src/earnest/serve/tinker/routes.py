"""The Tinker API over HTTP. Handlers read requests and write answers; ``service`` carries them out.

This module does not import torch: the service is made when the host has loaded its model, and requests wait for it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from earnest.errors import EarnestError, MissingExtra
from earnest.serve.tinker.errors import TOO_DEEP, WireError
from earnest.serve.tinker.names import CheckpointPath

if TYPE_CHECKING:
    from earnest.serve.host import Host
    from earnest.serve.store import ServerStore
    from earnest.serve.tinker.futures import Promise
    from earnest.serve.tinker.service import Service

LIMIT = 64 << 20
"""Bytes of a decompressed body; ``RequestLimits`` bounds what is sent."""
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
Handler = Callable[[Request, str], Awaitable[Response]]
Body = Mapping[str, Any]


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body() or b"{}")
    except ValueError as error:
        raise WireError(f"the body is not JSON ({error}).") from error
    if not isinstance(body, dict):
        raise WireError(f"the body is a {type(body).__name__}; send a JSON object.")
    return body


@contextmanager
def _numbered(service: Service, run: object, seq: object) -> Iterator[None]:
    """Skip the number of a request that is refused for good; one that the SDK sends again keeps its number."""
    try:
        yield
    except (EarnestError, *_ODD) as error:
        if getattr(error, "status", 400) in (400, 404):
            service.skip(run, seq)
        raise


def _answering_errors(handler: Handler, path: str) -> Callable[[Request], Awaitable[Response]]:
    """Errors as answers: a client's mistake with its sentence, a missing or odd field as a 400."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request, path)
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


class LazyService:
    """The service, once the host has loaded its model."""

    def __init__(self, host: Host, store: ServerStore) -> None:
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


def router(host: Host, store: ServerStore) -> APIRouter:
    """All endpoints under /api/v1, on one service; it is closed with the app."""
    lazy = LazyService(host, store)

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        yield
        if lazy.service is not None:
            await asyncio.to_thread(lazy.service.close)

    api = APIRouter(prefix="/api/v1", include_in_schema=False, lifespan=lifespan)

    async def promised(request: Request, path: str) -> Response:
        service, body = await lazy.get(), await _body(request)
        with _numbered(service, body.get("model_id"), body.get("seq_id")):
            return _accepted(PROMISED[path](service, body))

    async def run_pass(request: Request, _: str) -> Response:
        from earnest.serve.tinker import wire

        service, sent, headers = await lazy.get(), await request.body(), request.headers
        body = await asyncio.to_thread(wire.decompress, sent, headers.get("content-encoding", ""), LIMIT)
        run, seq, decode = await asyncio.to_thread(wire.read_pass, body, headers.get("content-type", ""))
        with _numbered(service, run, seq):
            return _accepted(service.pass_(await asyncio.to_thread(decode)))

    async def retrieve(request: Request, _: str) -> Response:
        promise = (await lazy.get()).promises.get(str((await _body(request))["request_id"]))
        result = await promise.wait(POLL)
        if result is None:
            return JSONResponse({"type": "try_again", "request_id": promise.id, "queue_state": "active"}, 408)
        from earnest.serve.tinker import wire

        protobuf = wire.PROTOBUF in request.headers.get("accept", "")
        data, kind = await asyncio.to_thread(wire.write, result, protobuf=protobuf)
        promise.fetched = True
        return Response(data, media_type=kind)

    async def answered(request: Request, path: str) -> Response:
        found = ANSWERED[path](await lazy.get(), request, await _body(request))
        return Response(status_code=204) if found is None else JSONResponse(found)

    async def fixed(_: Request, path: str) -> Response:
        return JSONResponse(FIXED[path])

    async def healthz(_: Request, __: str) -> Response:
        if not host.ready():
            return JSONResponse({"detail": host.failure or "the model is being loaded."}, 503)
        return JSONResponse({"status": "ok"})

    tables = ((fixed, FIXED), (answered, ANSWERED), (promised, PROMISED))
    routes: list[tuple[Handler, str]] = [(handler, path) for handler, table in tables for path in table]
    routes += [(run_pass, "POST /forward_backward"), (run_pass, "POST /forward"), (retrieve, "POST /retrieve_future")]
    for handler, path in [*routes, (healthz, "GET /healthz")]:
        method, _, place = path.partition(" ")
        api.add_api_route(place, _answering_errors(handler, path), methods=[method], response_model=None)
    return api


def _accepted(promise: Promise) -> Response:
    return JSONResponse({"request_id": promise.id, **promise.facts})


def _page(request: Request, found: list[Any]) -> tuple[list[Any], dict[str, int]]:
    limit, offset = (int(request.query_params.get(k, v)) for k, v in (("limit", 20), ("offset", 0)))
    if limit < 0 or offset < 0:
        raise WireError(f"limit is {limit} and offset {offset}; give numbers of 0 or more.")
    return found[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(found)}


def _path(request: Request) -> CheckpointPath:
    return CheckpointPath.parse(f"tinker://{request.path_params['run']}/{request.path_params['checkpoint']}")


def _runs(service: Service, request: Request, _: Body) -> Body:
    shown, cursor = _page(request, service.checkpoints.runs())
    return {"training_runs": [service.checkpoints.describe(r) for r in shown], "cursor": cursor}


def _checkpoints(service: Service, request: Request, _: Body) -> Body:
    found = [c for run in service.checkpoints.runs() for c in service.checkpoints.checkpoints(run)]
    shown, cursor = _page(request, sorted(found, key=lambda c: str(c["time"]), reverse=True))
    return {"checkpoints": shown, "cursor": cursor}


FIXED: Mapping[str, Body] = {
    "POST /client/config": CLIENT_CONFIG,
    "POST /client/dynamic_config": {"refresh_interval_sec": 3600, "sample_cancel_enabled": False},
    "POST /telemetry": {"status": "accepted"},  # it is not read and not kept
}
"""Answers that need no model."""

ANSWERED: Mapping[str, Callable[[Service, Request, Body], Body | None]] = {
    "POST /create_session": lambda service, _, body: service.create_session(body),
    "POST /session_heartbeat": lambda service, _, body: service.heartbeat(str(body["session_id"])),
    "POST /get_info": lambda service, _, body: service.info(str(body["model_id"])),
    "POST /create_sampling_session": lambda service, _, body: service.create_sampler(body),
    "POST /join_sampling_session": lambda service, _, body: service.join(str(body["sampling_session_id"])),
    "POST /weights_info": lambda service, _, body: service.weights_info(str(body["tinker_path"])),
    "POST /sessions/{session_id}/finish": lambda service, r, _: service.finish_session(r.path_params["session_id"]),
    "GET /get_server_capabilities": lambda service, *_: service.capabilities(),
    "GET /samplers/{sampler_id}": lambda service, r, _: service.sampler(r.path_params["sampler_id"]),
    "GET /training_runs": _runs,
    "GET /training_runs/{run}": lambda service, r, _: service.checkpoints.describe(r.path_params["run"]),
    "GET /training_runs/{run}/checkpoints": lambda service, r, _: {
        "checkpoints": service.checkpoints.checkpoints(r.path_params["run"])
    },
    "PUT /training_runs/{run}/checkpoints/{checkpoint:path}/ttl": lambda service, r, body: service.checkpoints.set_ttl(
        _path(r), body.get("ttl_seconds")
    ),
    "DELETE /training_runs/{run}/checkpoints/{checkpoint:path}": lambda service, r, _: service.checkpoints.delete(
        _path(r)
    ),
    "GET /checkpoints": _checkpoints,
    "GET /sessions": lambda service, r, _: {"sessions": _page(r, list(service.sessions))[0]},
    "GET /sessions/{session_id}": lambda service, r, _: service.describe_session(r.path_params["session_id"]),
}
"""Calls that are answered at once; None is answered with 204."""

PROMISED: Mapping[str, Callable[[Service, Body], Promise]] = {
    "POST /create_model": lambda service, body: service.create_model(body),
    "POST /optim_step": lambda service, body: service.optim_step(body),
    "POST /save_weights": lambda service, body: service.save_weights(body),
    "POST /save_weights_for_sampler": lambda service, body: service.save_for_sampler(body),
    "POST /load_weights": lambda service, body: service.load_weights(body),
    "POST /asample": lambda service, body: service.sample(body),
}
"""Calls whose result is fetched later."""
