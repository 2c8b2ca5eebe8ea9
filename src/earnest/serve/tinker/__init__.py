"""The Tinker API on the host's model: the unmodified ``tinker`` SDK trains and samples here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import APIRouter

    from earnest.serve.host import Host
    from earnest.serve.store import ServerStore


def router(host: Host, store: ServerStore) -> APIRouter:
    """The endpoints under /api/v1; torch is imported with them, not with this package."""
    from earnest.serve.tinker.routes import router as build

    return build(host, store)
