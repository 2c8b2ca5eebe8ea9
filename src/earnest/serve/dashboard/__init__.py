"""The dashboard: a page at ``/`` that watches ``/v1/events`` and uses the same API as every client.

The page and its parts hold no data, so they need no key; the page requests data with the visitor's own key.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse

from earnest.serve.dashboard import runs
from earnest.serve.errors import NotFound
from earnest.serve.keys import Who
from earnest.serve.state import State
from earnest.serve.wire import ERRORS

KINDS = {".css": "text/css", ".js": "text/javascript"}
PARTS = ("dom.js", "wire.js", "chart.js", "chat.js", "versions.js", "feedback.js", "runs.js", "page.js")
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def router(state: State) -> APIRouter:
    """``/``, its parts, and ``/v1/runs``."""
    api = APIRouter(tags=["dashboard"])

    @api.get("/", include_in_schema=False)
    def page() -> HTMLResponse:
        return HTMLResponse(_asset("index.html"), headers=HEADERS)

    @api.get("/dashboard/{part}", include_in_schema=False)
    def part(part: str) -> Response:
        """The stylesheet is the report's plus the dashboard's own."""
        if part == "page.css":
            from earnest.report.blocks import asset

            return Response(asset("page.css") + _asset("page.css"), media_type=KINDS[".css"], headers=HEADERS)
        if part in PARTS:
            return Response(_asset(part), media_type=KINDS[".js"], headers=HEADERS)
        raise NotFound(f"the dashboard has no part {part[:80]!r}.")

    @api.get("/v1/runs", summary="Runs in run folders beside this server", responses=ERRORS)
    def listed(caller: Who) -> dict[str, Any]:
        seen = caller.may("runs", "read")
        return {"object": "list", "data": [runs.summary(p) for p in runs.folders(state.settings)] if seen else []}

    @api.get("/v1/runs/{name}", summary="A run's curves and its verdict", responses=ERRORS)
    def one(name: str, caller: Who) -> dict[str, Any]:
        return runs.detail(_found(state, name, caller))

    @api.get(
        "/v1/runs/{name}/report",
        summary="A run's report, as `earnest report` makes it",
        responses=ERRORS | {200: {"content": {"text/html": {"schema": {"type": "string"}}}}},
        response_model=None,
    )
    def report(name: str, caller: Who) -> HTMLResponse:
        from earnest.report.load import load
        from earnest.report.page import render

        return HTMLResponse(render(load(_found(state, name, caller))))

    return api


def _found(state: State, name: str, caller: Any) -> Any:
    """The run of this name among the existing folders; a request's text never becomes a path."""
    for path in runs.folders(state.settings) if caller.may("runs", "read") else ():
        if path.name == name:
            return path
    raise NotFound(f"there is no run {name[:80]!r}; GET /v1/runs lists them.", "name")


def _asset(name: str) -> str:
    return resources.files(__name__).joinpath("assets", name).read_text(encoding="utf-8")
