"""/v1/adapters: the adapters and their versions: roll back, pin, promote, diff, export, fork, delete."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from earnest.serve import versions
from earnest.serve.attempts import REASON
from earnest.serve.errors import BadRequest, Conflict, Forbidden, NotFound, damaged
from earnest.serve.keys import Caller, Right, Who
from earnest.serve.names import check_name
from earnest.serve.rows import AdapterRow, VersionRow
from earnest.serve.state import State
from earnest.serve.wire import ERRORS, Name, StrictBody

Number = Annotated[int, Field(ge=0, lt=2**31)]


class NewAdapter(StrictBody):
    """POST /v1/adapters"""

    name: Name
    learn: dict[str, Any] = Field(default_factory=dict, description="settings that differ from the server's own")


class Fork(StrictBody):
    """A new adapter that starts from a version of this one."""

    name: Name
    version: Number | None = Field(None, description="none: the live one")


class Purge(StrictBody):
    """POST /v1/adapters/NAME/purge"""

    before: float = Field(description="seconds since 1970; later conversations stay")


class Which(StrictBody):
    """A version."""

    version: Number | None = None


def router(state: State) -> APIRouter:
    api = APIRouter(prefix="/v1/adapters", responses=ERRORS, tags=["adapters"])

    def find(name: str, caller: Caller, right: Right) -> AdapterRow:
        caller.demand(name, right)
        return state.store.adapter(name)

    def show(row: AdapterRow) -> dict[str, Any]:
        return {
            "object": "adapter",
            **{name: getattr(row, name) for name in ("name", "created", "live", "pinned", "origin", "learn")},
            "set_aside": REASON.replace("NAME", row.name) if row.id in state.attempts.set_aside() else None,
            "feedback": state.store.counts(row.id),
            "versions": [v.number for v in state.store.versions(row.id)],
        }

    def changed(row: AdapterRow, what: str, **more: Any) -> dict[str, Any]:
        found = show(state.store.adapter(row.name))
        state.bus.publish("adapter", row.name, what=what, live=found["live"], pinned=found["pinned"], **more)
        return found

    @api.get("", summary="The adapters")
    def listed(caller: Who) -> dict[str, Any]:
        return {"object": "list", "data": [show(a) for a in state.store.adapters() if caller.may(a.name, "read")]}

    @api.post("", status_code=201, summary="Make one")
    def create(body: NewAdapter, caller: Who) -> dict[str, Any]:
        check_name(body.name)
        caller.demand_new(body.name)
        if body.name == state.settings.model:
            raise Conflict(f"{body.name!r} is the base model's own name here; choose another.", "name")
        if body.learn:
            if not state.settings.client_learn:
                raise Forbidden("this server takes no `learn` from clients (--no-client-learn); leave it out.", "learn")
            state.wait()
            from earnest.serve.learning import check_limits, overridden

            assert state.learner is not None
            config = state.learner.config
            check_limits(overridden(config, body.learn), config, caller.limits)
        return changed(state.store.create(body.name, body.learn), "created")

    @api.get("/{name:path}/versions", summary="Its versions")
    def history(name: str, caller: Who) -> dict[str, Any]:
        row = find(name, caller, "read")
        return {"object": "list", "data": [_version(v, row) for v in state.store.versions(row.id)]}

    @api.get(
        "/{name:path}/versions/{number}/export", summary="A version as a zip of PEFT's files", response_class=Response
    )
    def export(name: str, number: Number, caller: Who) -> Response:
        row = find(name, caller, "read")
        if number == 0:
            raise NotFound("version 0 is the base; there is nothing to export.")
        version = state.store.version(row, number)
        if not versions.intact(state.store.version_folder(row.id, version.number), "adapter", "version.json"):
            raise damaged(row.name, number)
        content = versions.zipped(state.store.version_folder(row.id, version.number))
        file = f"{row.name.replace('/', '-')}-v{number}.zip"
        headers = {"Content-Disposition": f'attachment; filename="{file}"'}
        return Response(content, media_type="application/zip", headers=headers)

    @api.get("/{name:path}/versions/{number}", summary="A version: data, config, metrics, verdicts")
    def version(name: str, number: Number, caller: Who) -> dict[str, Any]:
        row = find(name, caller, "read")
        found = state.store.version(row, number)
        record = {**found.record, "answers": []} if caller.own else found.record
        return {**_version(found, row), **record}

    @api.delete("/{name:path}/versions/{number}", summary="Delete a version")
    def forget(name: str, number: Number, caller: Who) -> dict[str, Any]:
        row = find(name, caller, "delete")
        state.store.delete_version(row.id, number)
        state.leases.forget(row.id, number)
        versions.remove(state.store.version_folder(row.id, number))
        return changed(row, "version deleted", number=number)

    @api.get("/{name:path}/diff", summary="What changed between two versions")
    def diff(name: str, caller: Who, old: Number, new: Number) -> dict[str, Any]:
        row = find(name, caller, "read")
        state.wait()
        return versions.diff(state, row, old, new)

    @api.post("/{name:path}/rollback", summary="Answer with an earlier version again")
    def rollback(name: str, body: Which, caller: Who) -> dict[str, Any]:
        row = find(name, caller, "teach")
        state.store.set_live(row.id, body.version, candidates=False)
        return changed(row, "rolled back")

    @api.post("/{name:path}/promote", summary="Make a candidate live, even if the gate refused it")
    def promote(name: str, body: Which, caller: Who) -> dict[str, Any]:
        row = find(name, caller, "teach")
        if body.version is None:
            raise BadRequest("version: give the number of the candidate.", "version")
        state.store.set_live(row.id, body.version)
        return changed(row, "promoted")

    @api.post("/{name:path}/pin", summary="Keep a version live whatever is learned; null: end that")
    def pin(name: str, body: Which, caller: Who) -> dict[str, Any]:
        row = find(name, caller, "teach")
        state.store.pin(row.id, body.version)
        return changed(row, "unpinned" if body.version is None else "pinned")

    @api.post("/{name:path}/fork", status_code=201, summary="A new adapter that starts from a version")
    def fork(name: str, body: Fork, caller: Who) -> dict[str, Any]:
        row = find(name, caller, "read")
        check_name(body.name)
        caller.demand_new(body.name)
        made = versions.fork(state, row, row.live if body.version is None else body.version, body.name)
        return changed(made, "forked", origin=made.origin)

    @api.post("/{name:path}/cancel", summary="Cancel the running update and withdraw the queued feedback")
    def cancel(name: str, caller: Who) -> dict[str, Any]:
        row = find(name, caller, "teach")
        withdrawn = state.store.cancel(row.id)
        if state.learner is not None:
            state.learner.cancel(row.id)
        return changed(row, "cancelled", withdrawn=withdrawn) | {"cancelled": withdrawn}

    @api.post("/{name:path}/purge", summary="Delete its conversations that are older than a given time")
    def purge(name: str, body: Purge, caller: Who) -> dict[str, Any]:
        row = find(name, caller, "delete")
        return {"object": "purged", "adapter": row.name, "deleted": state.store.purge(body.before, row.id)}

    @api.post("/{name:path}/resume", summary="Learn again after learning was set aside")
    def resume(name: str, caller: Who) -> dict[str, Any]:
        row = find(name, caller, "teach")
        state.attempts.end(row.id, done=True)
        if state.learner is not None:
            state.learner.wake()
        return changed(row, "resumed")

    @api.get("/{name:path}", summary="One adapter")
    def one(name: str, caller: Who) -> dict[str, Any]:
        return show(find(name, caller, "read"))

    @api.delete("/{name:path}", summary="Delete an adapter, its versions and its feedback")
    def delete(name: str, caller: Who) -> dict[str, Any]:
        row = find(name, caller, "delete")
        state.store.delete(row.id)
        if state.learner is not None:
            state.learner.cancel(row.id)
        state.leases.forget(row.id)
        versions.remove(state.store.version_folder(row.id, 0).parent)
        state.bus.publish("adapter", row.name, what="deleted")
        return {"object": "adapter.deleted", "name": row.name, "deleted": True}

    return api


def _version(version: VersionRow, row: AdapterRow) -> dict[str, Any]:
    record = version.record
    return {
        "object": "version",
        "adapter": row.name,
        "live": version.number == row.live,
        **{name: getattr(version, name) for name in ("number", "parent", "created", "status", "reason")},
        "feedback": record["feedback"],
        "loss": record["metrics"].get("loss"),
        "gate": record["gate"]["holds"],
        "audit": record["audit"]["holds"],
    }
