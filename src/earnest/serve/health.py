"""/health and /v1/events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Header
from fastapi.responses import StreamingResponse

from earnest.serve.errors import Busy
from earnest.serve.events import Event
from earnest.serve.keys import Who
from earnest.serve.state import State
from earnest.serve.wire import ERRORS
from earnest.version import __version__


def router(state: State) -> APIRouter:
    api = APIRouter(responses=ERRORS, tags=["server"])

    @api.get("/health", summary="Whether the server is up, and the model loaded")
    @api.get("/v1/health", include_in_schema=False)
    def health() -> dict[str, Any]:
        """Needs no key, and returns nothing that would need one."""
        ready = state.host.ready()
        found: dict[str, Any] = {
            "status": "ok" if ready else "failed" if state.host.failure else "loading",
            "version": __version__,
            "accepts_feedback": (failure := state.storage()) is None,
        }
        if failure is not None:
            found["storage"] = f"nothing can be stored: {failure}"
        if aside := len(state.attempts.set_aside()):
            found["set_aside"] = aside
        if failed := state.store.failed():
            found["failed_feedback"] = failed
        if ready and not state.keys.on:
            found["model"] = state.host.policy.describe()
            found["chat"] = state.host.decoder.load()
            found["waiting"] = state.host.turns.waiting()
            found["attached"] = len(state.host.attached())
            found["learning"] = None if state.learner is None else state.learner.doing
        return found

    @api.get("/v1/events", summary="The server's events (server-sent events)", response_class=StreamingResponse)
    async def events(
        caller: Who,
        last_event_id: Annotated[str | None, Header(max_length=20)] = None,
    ) -> StreamingResponse:
        after = int(last_event_id) if last_event_id and last_event_id.isascii() and last_event_id.isdigit() else None
        if state.streams[caller.name] >= state.settings.max_streams:
            raise Busy(f"{state.settings.max_streams} streams of events are open for this key; close one of them.")

        def visible(event: Event) -> bool:
            if event.adapter is not None and not caller.may(event.adapter, "read"):
                return False
            return event.kind != "feedback" or caller.sees(event.data["key"])

        async def lines() -> AsyncIterator[str]:
            state.streams[caller.name] += 1
            try:
                async with aclosing(state.bus.listen(visible, after, ("answers",) if caller.own else ())) as found:
                    async for line in found:
                        yield line
            finally:
                state.streams[caller.name] -= 1

        return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    return api
