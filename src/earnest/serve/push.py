"""Adapters that were trained elsewhere: vLLM's /v1/load_lora_adapter and /v1/unload_lora_adapter, an upload, and the
end of an adapter's completions that are under way.

A pushed adapter answers under its name, with its version 1, once the request is answered. It does not learn
here: its owner trains it elsewhere. A path in a request is looked up in the folder ``loras`` of --data and nowhere
else; an upload is the zip of an export, and only known file names are accepted.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import PlainTextResponse
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from earnest.serve import versions
from earnest.serve.errors import BadRequest, Conflict, ServeError, TooLarge, reason
from earnest.serve.keys import Caller, Who
from earnest.serve.names import check_name
from earnest.serve.state import State
from earnest.serve.store import PUSHED, AdapterRow
from earnest.serve.wire import ERRORS, Name, StrictBody

if TYPE_CHECKING:
    from earnest.adapters import Adapter
    from earnest.serve.host import Host

LARGEST = 1000.0  # ‖ΔW‖ / ‖W‖; trained adapters stay below 10
FILES = ("adapter_config.json", "adapter_model.safetensors", "earnest_adapter.json", "earnest_adapter.safetensors")
IGNORED = ("version.json", "README.md")
UPLOAD = "/v1/upload_lora_adapter"
# Success is a sentence in plain text, as with vLLM; errors are JSON.
PLAIN_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


class Load(StrictBody):
    """POST /v1/load_lora_adapter"""

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=1000, description="a folder in DATA/loras")]
    load_inplace: bool = Field(False, description="replace a pushed adapter of this name; needs the right to delete")


class Pushed(StrictBody):
    """POST /v1/unload_lora_adapter, POST /v1/abort_lora_adapter"""

    lora_name: Name


def router(state: State) -> APIRouter:
    api = APIRouter(prefix="/v1", responses=ERRORS | PLAIN_TEXT, tags=["push"])

    @api.post("/load_lora_adapter", summary="Load an adapter from a folder")
    def load(body: Load, caller: Who) -> PlainTextResponse:
        _allowed(body.lora_name, caller)
        _old(state, body.lora_name, body.load_inplace, caller)
        install(state, body.lora_name, _folder(state, body.lora_path), body.load_inplace, caller)
        return PlainTextResponse(f"{body.lora_name} is loaded.")

    @api.post(
        "/upload_lora_adapter",
        summary="Load an adapter from the body, the zip of an export",
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
            }
        },
    )
    async def upload(
        request: Request,
        caller: Who,
        lora_name: Name,
        load_inplace: bool = False,
        policy_version: Annotated[int | None, Query(ge=0, le=1 << 53)] = None,
    ) -> PlainTextResponse:
        _allowed(lora_name, caller)
        await run_in_threadpool(_old, state, lora_name, load_inplace, caller)
        content = await request.body()
        files = await run_in_threadpool(unzipped, content, state.settings.max_upload)
        await run_in_threadpool(install, state, lora_name, files, load_inplace, caller, policy_version)
        return PlainTextResponse(f"{lora_name} is loaded.")

    @api.post("/unload_lora_adapter", summary="Forget a pushed adapter")
    def unload(body: Pushed, caller: Who) -> PlainTextResponse:
        row = _pushed(state, body.lora_name, caller)
        state.store.delete(row.id)
        _clear(state, row.id)
        state.bus.publish("adapter", row.name, what="unloaded")
        return PlainTextResponse(f"{row.name} is unloaded.")

    @api.post("/abort_lora_adapter", summary="End a pushed adapter's completions that are under way")
    def abort(body: Pushed, caller: Who) -> PlainTextResponse:
        """Each is answered with its tokens so far and the finish_reason `abort`. Later requests are not affected."""
        row = _pushed(state, body.lora_name, caller)
        state.wait()
        with state.leases.lease(row.name) as lease:
            count = state.host.decoder.abort(lease.adapter)
        return PlainTextResponse(f"{count} requests for {row.name} are ended.")

    return api


def _pushed(state: State, name: str, caller: Caller) -> AdapterRow:
    """The pushed adapter of this name, which the caller may delete."""
    caller.demand(name, "delete")
    row = state.store.adapter(name)
    if row.origin != PUSHED:
        raise Conflict(
            f"{row.name} learns here and was not pushed; DELETE /v1/adapters/{row.name} forgets it.", "lora_name"
        )
    return row


def _allowed(name: str, caller: Caller) -> None:
    check_name(name)
    caller.demand_new(name)


def _folder(state: State, given: str) -> dict[str, bytes]:
    """The known files of a folder in ``loras``. The path is resolved first, links included; a path outside gets the
    same error whether or not it exists."""
    place = (state.settings.data / "loras").resolve()
    try:
        path = (place / given).resolve()
        inside = path.is_relative_to(place) and path != place and path.is_dir()
        files = {n: _bytes(path / n, place, state.settings.max_upload) for n in FILES} if inside else {}
    except (OSError, ValueError):
        files = {}
    found = {n: b for n, b in files.items() if b is not None}
    if not found:
        raise BadRequest(
            "lora_path: there is no adapter in such a folder of DATA/loras, the only place where paths are looked up; "
            f"put it there, or send it to {UPLOAD}.",
            "lora_path",
        )
    return found


def _bytes(path: Path, place: Path, most: int) -> bytes | None:
    if not path.is_file() or not path.resolve().is_relative_to(place):
        return None
    if path.stat().st_size > most:
        raise _too_large(most)
    return path.read_bytes()


def _too_large(most: int) -> TooLarge:
    return TooLarge(f"the adapter has more than {most} bytes, which is the limit here.")


def unzipped(content: bytes, most: int) -> dict[str, bytes]:
    """The files of an export's zip; unknown names, names twice, and more than ``most`` bytes are refused."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = [e for e in archive.infolist() if e.filename not in IGNORED]
            names = [e.filename for e in entries]
            strange = sorted(set(names) - set(FILES))
            if strange or len(set(names)) < len(names):
                raise BadRequest(f"the zip may hold {', '.join(FILES)}, each once; it also has {strange[:3]}.")
            if sum(e.file_size for e in entries) > most:
                raise _too_large(most)
            found: dict[str, bytes] = {}
            for entry in entries:
                with archive.open(entry) as file:
                    found[entry.filename] = file.read(entry.file_size + 1)
    except ServeError:
        raise
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, OSError, EOFError, ValueError) as error:
        raise BadRequest(f"the body is not a readable zip ({error}); send the zip of an export.") from None
    if not found:
        raise BadRequest("the zip holds no adapter; send the zip of an export.")
    return found


def _old(state: State, name: str, inplace: bool, caller: Caller) -> int | None:
    """The number of the adapter that a push under this name replaces, if there is one and it may be replaced."""
    old = next((a for a in state.store.adapters() if a.name == name), None)
    if old is None:
        return None
    if old.origin == PUSHED and not state.store.versions(old.id):  # a process of an earlier release died while pushing
        return old.id
    if old.origin != PUSHED or not inplace:
        raise Conflict(f"there is an adapter {name!r} already; unload it first, or take another name.", "lora_name")
    caller.demand(name, "delete")
    return old.id


def install(
    state: State,
    name: str,
    files: Mapping[str, bytes],
    inplace: bool,
    caller: Caller,
    policy_version: int | None = None,
) -> None:
    """Version 1 of a new adapter: its files are written and loaded into the model, and then its name becomes known;
    an adapter that it replaces answers until then. ``policy_version`` is its number at the trainer."""
    state.wait()
    old = _old(state, name, inplace, caller)
    made = state.store.reserve()

    def fill(fresh: Path) -> None:
        (fresh / "adapter").mkdir()
        for file, content in files.items():
            (fresh / "adapter" / file).write_bytes(content)

    # This server knows only the weights: the version was not audited here and passed no gate.
    nothing: dict[str, Any] = {"holds": None, "counts": {}, "cost": 0.0, "findings": []}
    record: dict[str, Any] = {key: [] for key in ("feedback", "data", "curve", "answers")}
    record |= {"config": {}, "metrics": {}, "gate": nothing, "audit": nothing}
    record |= {"parent": 0, "policy_version": policy_version}
    try:
        versions.write(state.store.version_folder(made, 1), fill, record)
        _check(state, made)
        state.store.add_whole(made, name, {}, PUSHED, record, old)
    except Exception:
        _clear(state, made)
        raise
    if old is not None:
        _clear(state, old)
    state.bus.publish("adapter", name, what="pushed", live=1, pinned=False)


def _check(state: State, adapter: int) -> None:
    """The adapter fits onto the model and its numbers are usable, or the request is refused."""
    try:
        with state.leases.checked(adapter, 1) as mounted:
            check_numbers(state.host, mounted)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        raise BadRequest(f"this adapter cannot be used with {state.host.policy.name}: {reason(error)}") from None


def check_numbers(host: Host, adapter: Adapter) -> None:
    """Raise ``AdapterError`` unless each change of a weight is finite and not far larger than the weight, and a forward
    pass gives a finite distribution that is not uniform."""
    import torch

    from earnest.adapters.errors import AdapterError

    policy = host.policy
    with torch.no_grad(), host.turn("chat", adapter) as turn:
        for path, delta in adapter.deltas():
            change, weight = float(delta.norm()), float(adapter.slots[path].layer.weight().float().norm())
            if not change <= LARGEST * weight:
                raise AdapterError(
                    f"the change of {path} has the norm {change:g}, its weight {weight:g}; at most {LARGEST:g} times "
                    "the weight is allowed. Check lora_alpha and the rank, or train it again"
                )
            turn.yield_turn()
        ids = torch.arange(min(8, policy.head.weight.shape[0]), device=policy.device)[None]
        logits = policy.head.logits(policy.hidden(ids)).float()
    if not bool(logits.isfinite().all()) or float(logits.max() - logits.min()) == 0.0:
        raise AdapterError("a forward pass with it gives logits that are not finite, or all equal; train it again")


def _clear(state: State, adapter: int) -> None:
    """Remove an adapter from the model and from the disk."""
    state.leases.forget(adapter)
    versions.remove(state.store.version_folder(adapter, 0).parent)
