"""Write-once objects in a bucket, each with its writer's id and a hash of all its bytes.

    object  =  "# " + JSON header + "\\n" + payload           header: kind, writer, meta, sha256

The only write operation is *create*: it succeeds for exactly one writer. Nothing is overwritten, and no decision
depends on a clock. If the answer to a create is lost, a retry finds the object with this writer's id.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar
from urllib.parse import urlparse

from earnest.errors import EarnestError, MissingExtra

T = TypeVar("T")
KeyList = list[str]  # inside classes, `list` is a method
FORMAT = 1
METADATA = "169.254.169.254"
"""The address from which machines in a cloud get their credentials."""
MARK = b"# "  # so that config.yaml is YAML, header and all


class StoreError(EarnestError):
    """A bucket cannot be used: it overwrites, it is not there, or it did not answer for too long."""


class Damaged(EarnestError):
    """An object is not the one that was written."""


class AlreadyThere(Exception):
    """A create found the key taken."""


class Unavailable(Exception):
    """The store did not answer, or answered with a temporary error; the same request may succeed later."""


class Store(Protocol):
    """Four operations. ``create`` raises ``AlreadyThere``. Each may raise ``Unavailable``, even if it succeeded."""

    def create(self, key: str, data: bytes) -> None: ...

    def get(self, key: str) -> bytes | None: ...

    def list(self, prefix: str) -> KeyList: ...

    def delete(self, keys: KeyList) -> None: ...


@dataclass(frozen=True)
class Object:
    """The object of a key. ``size`` is the number of bytes that were transferred, header included."""

    key: str
    kind: str
    writer: str
    meta: Mapping[str, Any]
    payload: bytes
    size: int


@dataclass
class Traffic:
    """Requests and bytes since this bucket was opened."""

    requests: int = 0
    sent: int = 0
    received: int = 0
    retries: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def count(self, **more: int) -> None:
        """Add to the counts; safe for several threads."""
        with self._lock:
            for name, number in more.items():
                setattr(self, name, getattr(self, name) + number)


@dataclass
class Bucket:
    """A prefix in a store, for one writer. ``patience``: seconds without an answer after which it raises. ``prefix``:
    of all keys, which have it in the store only."""

    store: Store
    url: str = "memory:"
    writer: str = field(default_factory=lambda: uuid.uuid4().hex)
    patience: float = 120.0
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    traffic: Traffic = field(default_factory=Traffic)
    prefix: str = ""

    @classmethod
    def open(cls, url: str, *, writer: str = "", patience: float = 120.0) -> Bucket:
        """The bucket at ``s3://…``, ``gs://…``, ``az://…`` or ``file:///…``."""
        label = f"{writer}-{uuid.uuid4().hex[:12]}" if writer else uuid.uuid4().hex
        return cls(open_store(url), url, label, patience)

    def create(self, key: str, kind: str, payload: bytes = b"", meta: Mapping[str, Any] | None = None) -> bool:
        """Write ``key`` if it is free. True: this object is stored now (also if an answer was lost)."""
        data = seal(kind, self.writer, payload, meta or {})

        def attempt() -> bool:
            try:
                self.store.create(self.prefix + key, data)
            except AlreadyThere:
                return self._is(key, data)
            self.traffic.count(sent=len(data))
            return True

        return self._patiently(f"create {key}", attempt)

    def _is(self, key: str, data: bytes) -> bool:
        found = self.store.get(self.prefix + key)
        self.traffic.count(requests=1, received=len(found or b""))
        if found is None:  # S3 answers 409 while another create of the key is in progress, which may fail
            raise Unavailable(f"{key} was refused as taken, but is not there")
        return found == data

    def get(self, key: str) -> Object | None:
        """The object, or None if there is none; ``Damaged`` if its hash does not match."""
        data = self._patiently(f"get {key}", lambda: self.store.get(self.prefix + key))
        if data is None:
            return None
        self.traffic.count(received=len(data))
        return unseal(key, data)

    def list(self, prefix: str) -> KeyList:
        """Keys under ``prefix``, sorted."""
        found = self._patiently(f"list {prefix}", lambda: self.store.list(self.prefix + prefix))
        return sorted(key.removeprefix(self.prefix) for key in found)

    def delete(self, keys: Iterable[str]) -> None:
        wanted = [self.prefix + key for key in keys]
        if wanted:
            self._patiently(f"delete {len(wanted)} objects", lambda: self.store.delete(wanted))

    def under(self, prefix: str) -> Bucket:
        """The objects below ``prefix``, by their keys without it; traffic is counted together."""
        return replace(self, prefix=self.prefix + prefix)

    def probe(self) -> None:
        """Raise if a second create of a key succeeds in this store: replicas would overwrite each other silently."""
        key = f"probe/{uuid.uuid4().hex}"
        payload = b"once"
        if not self.create(key, "probe", payload):
            raise StoreError(f"{self.url}: the fresh key {key} is taken; use a prefix of the run's own.")
        second = self.create(key, "probe", b"twice")
        found = self.get(key)
        self.delete([key])
        if second or found is None or found.payload != payload:
            raise StoreError(
                f"{self.url} does not keep what is written first: creating the same key twice succeeded (it ignores "
                "If-None-Match). Replicas would lose rounds silently there. Use S3, GCS, Azure, SeaweedFS, or a folder."
            )

    def _patiently(self, what: str, attempt: Callable[[], T]) -> T:
        wait, began = 0.05, self.clock()  # an attempt may hang for a minute, which counts too
        while True:
            self.traffic.count(requests=1)
            try:
                return attempt()
            except Unavailable as error:
                if self.clock() - began >= self.patience:
                    raise StoreError(
                        f"{self.url} did not answer for {self.patience:g} s ({what}: {error}). When it is back, start "
                        "the worker again: nothing that is committed is lost."
                    ) from None
                self.traffic.count(retries=1)
                pause = wait * (0.5 + random.random())  # jitter, so that writers do not retry at the same time
                self.sleep(pause)
                wait = min(2 * wait, 2.0)


def seal(kind: str, writer: str, payload: bytes, meta: Mapping[str, Any]) -> bytes:
    """Header and payload as one object; the hash covers both."""
    header = {"earnest": FORMAT, "kind": kind, "writer": writer, "size": len(payload), "meta": dict(meta)}
    return MARK + _line({**header, "sha256": _hash(header, payload)}) + b"\n" + payload


def unseal(key: str, data: bytes) -> Object:
    """Check the hash and split header and payload; a missing, added or changed byte raises ``Damaged``."""
    first, newline, payload = data.partition(b"\n")
    try:
        if not first.startswith(MARK):
            raise ValueError
        header = json.loads(first[len(MARK) :])
        told = header.pop("sha256")
        kind, writer, meta = header["kind"], header["writer"], header["meta"]
    except (ValueError, KeyError, AttributeError, TypeError):
        raise Damaged(f"{key} has no readable header: {len(data)} bytes.") from None
    if not newline or header.get("size") != len(payload) or _hash(header, payload) != told:
        raise Damaged(
            f"{key} is not what {writer} wrote: {len(payload)} of {header.get('size')} bytes, or changed ones."
        )
    return Object(key, kind, writer, meta, payload, len(data))


def _line(header: Mapping[str, Any]) -> bytes:
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode()


def _hash(header: Mapping[str, Any], payload: bytes) -> str:
    total = hashlib.sha256(_line(header))
    total.update(payload)
    return total.hexdigest()


class ObjectStore:
    """``obstore``: S3 and compatible stores, GCS, Azure, a folder, memory."""

    def __init__(self, url: str) -> None:
        try:
            import obstore
            from obstore import exceptions
            from obstore.store import from_url
        except ImportError:
            raise MissingExtra("obstore", "diloco", "a run in a bucket") from None
        self._api, self._absent = obstore, (exceptions.NotFoundError, FileNotFoundError)
        self._taken = (exceptions.AlreadyExistsError, exceptions.PreconditionError, FileExistsError)
        self._failures = (exceptions.BaseError, OSError)
        self._refused = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
        options: dict[str, Any] = {}
        if urlparse(url).scheme == "file":
            options["mkdir"] = True
        elif urlparse(url).scheme != "memory":
            from datetime import timedelta

            options["client_options"] = {"allow_http": True, "timeout": timedelta(seconds=60)}
            # Bucket retries and counts. obstore's own retries would hide a store that does not answer for minutes.
            options["retry_config"] = {"max_retries": 1, "retry_timeout": timedelta(seconds=5)}
        try:
            self._store = from_url(url, **options)
        except Exception as error:
            raise StoreError(f"{url} cannot be opened as a store: {error}") from None
        self._url = url

    def create(self, key: str, data: bytes) -> None:
        try:
            self._answered(lambda: self._api.put(self._store, key, data, mode="create", use_multipart=False))
        except self._taken:
            raise AlreadyThere(key) from None
        except self._absent:
            raise StoreError(f"{self._url}: there is no such bucket; create it first, or correct the URL.") from None

    def get(self, key: str) -> bytes | None:
        try:
            return self._answered(lambda: bytes(self._api.get(self._store, key).bytes()))
        except self._absent:
            return None

    def list(self, prefix: str) -> KeyList:
        return self._answered(
            lambda: [str(item["path"]) for page in self._api.list(self._store, prefix or None) for item in page]
        )

    def delete(self, keys: KeyList) -> None:
        with suppress(*self._absent):  # another process deleted it first
            self._answered(lambda: self._api.delete(self._store, keys))

    def _answered(self, request: Callable[[], T]) -> T:
        try:
            return request()
        except (*self._taken, *self._absent):
            raise
        except self._refused as error:
            if "RequestTimeTooSkewed" in str(error):
                raise StoreError(
                    f"{self._url} refuses access: this machine's clock is wrong ({time.strftime('%F %T %z')}), by more "
                    "than the minutes that a store allows. Set it (`timedatectl set-ntp true`) and start again."
                ) from None
            raise StoreError(
                f"{self._url} refuses access: {_plain(error)}. Set the store's keys in the environment."
            ) from None
        except self._failures as error:
            if METADATA in str(error):  # only machines in a cloud have this address
                raise StoreError(
                    f"{self._url}: no keys are set, and this machine has none of its own. Set AWS_ACCESS_KEY_ID and "
                    "AWS_SECRET_ACCESS_KEY (or GOOGLE_…, AZURE_…) in the environment."
                ) from None
            raise Unavailable(_plain(error)) from None


def _plain(error: BaseException) -> str:
    """An error of obstore on one line, without the debug output that follows it."""
    return " ".join(str(error).partition("Debug source:")[0].split())[:300]


def open_store(url: str) -> Store:
    """The store of a URL; an unknown scheme raises."""
    scheme = urlparse(url).scheme
    if scheme not in ("s3", "s3a", "gs", "az", "abfs", "abfss", "file", "memory"):
        raise StoreError(
            f"store={url}: give s3://bucket/prefix, gs://bucket/prefix, az://account/container/prefix, or file:///folder."
        )
    return ObjectStore(url)


def join(url: str, name: str) -> str:
    return f"{url.rstrip('/')}/{name}"
