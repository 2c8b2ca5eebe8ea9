"""Versions on disk: atomic folders, zips, differences, forks."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import zipfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from earnest.disk import sync
from earnest.serve.errors import Conflict, damaged
from earnest.serve.rows import AdapterRow
from earnest.serve.store import ServerStore

if TYPE_CHECKING:
    from earnest.serve.state import State

CHECKSUMS = "checksums.json"
OWNED = re.compile(r"\.?(\d{1,15})(?:\.deleted)?")  # an adapter's folder, or the rest of a deleted one


def write(folder: Path, fill: Callable[[Path], None], record: Mapping[str, Any]) -> None:
    """Fill a folder beside its place, sync it, rename it. A folder that exists already belongs to no version: a
    process died between the rename and the commit."""
    fresh = folder.with_name(f".{folder.name}.tmp")
    for stale in (fresh, folder):
        shutil.rmtree(stale, ignore_errors=True)
    try:
        fresh.mkdir(parents=True)
        fill(fresh)
        (fresh / "version.json").write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        (fresh / CHECKSUMS).write_text(json.dumps(_checksums(fresh), indent=1, sort_keys=True) + "\n")
        for path in [*(p for p in fresh.rglob("*")), fresh]:
            sync(path)
        fresh.rename(folder)
        sync(folder.parent)
    except BaseException:  # leave no half of a version on a full disk
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def remove(folder: Path) -> None:
    """Rename the folder, then delete it."""
    if folder.exists():
        dying = folder.with_name(f".{folder.name}.deleted")
        shutil.rmtree(dying, ignore_errors=True)
        folder.rename(dying)
        shutil.rmtree(dying, ignore_errors=True)


def sweep(store: ServerStore) -> None:
    """Delete, at the start, folders that no adapter owns. A process died after it wrote one and before the commit, or
    after the commit that deleted its adapter. A folder whose number this database never gave out is left alone."""
    found = [(int(m[1]), p) for p in (store.folder / "adapters").glob("*") if (m := OWNED.fullmatch(p.name))]
    orphans = set(store.orphans([number for number, _ in found]))
    for number, path in found:
        if number in orphans:
            shutil.rmtree(path, ignore_errors=True)


def _checksums(folder: Path, parts: Collection[str] = ("adapter", "engine", "version.json")) -> dict[str, str]:
    """SHA-256 of each file in these parts of a version, by its path."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.relative_to(folder).parts[0] in parts)
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def intact(folder: Path, *parts: str) -> bool:
    """Whether the files in these parts are those that were written. Earlier releases wrote no checksums."""
    try:
        if not (folder / CHECKSUMS).exists():
            return folder.is_dir()
        known = json.loads((folder / CHECKSUMS).read_text())
        return _checksums(folder, parts) == {k: v for k, v in known.items() if k.split("/")[0] in parts}
    except (OSError, ValueError):
        return False


def zipped(folder: Path) -> bytes:
    """The adapter in PEFT's format with the version's record, as a zip."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted((folder / "adapter").iterdir()):
            archive.write(path, path.name)
        archive.write(folder / "version.json", "version.json")
    return content.getvalue()


def fork(state: State, row: AdapterRow, number: int, name: str) -> AdapterRow:
    """A new adapter whose version 1 is this version, optimizer state included. Version 0 has nothing to copy.
    It appears when its files are written, so it never answers as the base."""
    origin = f"{row.name}@{number}"
    if number == 0:
        return state.store.create(name, row.learn, origin=origin)
    record = {**state.store.version(row, number).record, "feedback": [], "forked_from": origin}
    source = state.store.version_folder(row.id, number)
    if not (source / "engine").is_dir():
        raise Conflict(f"{origin} was pushed without an optimizer's state, so it cannot learn here.")
    if not intact(source, "adapter", "engine"):
        raise damaged(row.name, number)

    def fill(folder: Path) -> None:
        for part in ("adapter", "engine"):
            shutil.copytree(source / part, folder / part)

    made = state.store.reserve()
    place = state.store.version_folder(made, 1)
    try:
        write(place, fill, record)
        state.store.add_whole(made, name, row.learn, origin, record)
    except Exception:
        remove(place.parent)
        raise
    return state.store.adapter(name)


def diff(state: State, row: AdapterRow, old: int, new: int) -> dict[str, Any]:
    """The difference of two versions: weights by layer, feedback, settings, metrics."""
    records = [{} if n == 0 else state.store.version(row, n).record for n in (old, new)]
    settings, metrics = ([_flat(record.get(key, {})) for record in records] for key in ("config", "metrics"))
    before, after = (_ancestry(state, row, n) for n in (old, new))
    return {
        "object": "diff",
        "adapter": row.name,
        "old": old,
        "new": new,
        "weights": _weights(state, row, old, new),
        "settings": _changed(*settings),
        "metrics": _changed(*metrics),
        "feedback_only_in_old": [f for f in before if f not in after],
        "feedback_only_in_new": [f for f in after if f not in before],
    }


def _ancestry(state: State, row: AdapterRow, number: int) -> list[str]:
    """All feedback that a version has learned from, its parents' included."""
    known = {v.number: v for v in state.store.versions(row.id)}
    found: list[str] = []
    while number in known:
        found = [*known[number].record["feedback"], *found]
        number = known[number].parent
    return found


def _weights(state: State, row: AdapterRow, old: int, new: int) -> dict[str, Any]:
    """‖ΔW_new - ΔW_old‖ and both norms, for every layer that either of them adapts."""
    with (
        state.leases.lease(f"{row.name}@{old}") as a,
        state.leases.lease(f"{row.name}@{new}") as b,
        state.host.turn("chat") as turn,
    ):
        sides: list[dict[str, Any]] = []
        for adapter in (a.adapter, b.adapter):
            with state.host.only(adapter):
                sides.append({} if adapter is None else {path: d.detach() for path, d in adapter.deltas()})
            turn.yield_turn()
        layers = {}
        for path in sorted({*sides[0], *sides[1]}):
            x, y = (side.get(path) for side in sides)
            gap = y if x is None else x if y is None else y - x
            layers[path] = {
                "old": 0.0 if x is None else float(x.norm()),
                "new": 0.0 if y is None else float(y.norm()),
                "change": float(gap.norm()) if gap is not None else 0.0,
            }
        return {"layers": layers, "change": sum(v["change"] ** 2 for v in layers.values()) ** 0.5}


def _flat(data: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(data, Mapping):
        return {k: v for key, value in data.items() for k, v in _flat(value, f"{prefix}{key}.").items()}
    return {prefix.rstrip("."): data}


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {k: [old.get(k), new.get(k)] for k in sorted({*old, *new}) if old.get(k) != new.get(k)}
