"""API keys: who may read, teach and delete which adapters.

    keys:
      - name: alice
        sha256: 9f86d0…            # of the key itself, which the server does not store
        allow: {"team/*": [read, teach], base: [read]}

A key is 256 random bits, so a plain hash is enough. Without a file of keys every client may do everything, and the
server listens on loopback only.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from fastapi import Depends, Security
from fastapi.security import APIKeyHeader, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from earnest.errors import ConfigError
from earnest.serve.errors import Forbidden, NoAdapter, NoKey
from earnest.serve.settings import LearnLimits

Right = Literal["read", "teach", "delete"]
PREFIX = "tml-"  # the Tinker SDK accepts no other prefix


class KeyEntry(BaseModel):
    """A line of the file of keys."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="the holder's name in logs and versions")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", description="of the key, in hex")]
    allow: dict[str, list[Right]] = Field(description="adapter (or a pattern with *) → what may be done with it")
    sees: Literal["all", "own"] = Field("all", description="own: only the conversations and feedback of this key")
    limits: LearnLimits = Field(LearnLimits(), description="upper limits of the settings in `learn`")


class KeyFile(BaseModel):
    """The file of keys."""

    model_config = ConfigDict(extra="forbid", strict=True)

    keys: list[KeyEntry] = Field(min_length=1)


@dataclass(frozen=True)
class Caller:
    """The caller of a request. ``rules`` None: the server has no keys, and everything is allowed."""

    name: str = ""
    rules: dict[str, frozenset[str]] | None = field(default=None, repr=False)
    limits: LearnLimits = field(default=LearnLimits(), repr=False)
    own: bool = False
    """Whether conversations and feedback of other keys are hidden from it."""

    def sees(self, key: str) -> bool:
        """Whether the caller may see what the holder of this key wrote."""
        return not self.own or key == self.name

    def may(self, adapter: str, right: Right) -> bool:
        if self.rules is None:
            return True
        return any(fnmatchcase(adapter, pattern) and right in rights for pattern, rights in self.rules.items())

    def demand(self, adapter: str, right: Right) -> None:
        """Raise unless allowed; an adapter that may not be read is reported as missing."""
        if self.may(adapter, right):
            return
        if right == "read" or not self.may(adapter, "read"):
            raise NoAdapter(adapter)
        raise Forbidden(f"the key {self.name!r} may not {right} {adapter!r}; ask the server's administrator.", "model")

    def demand_new(self, adapter: str) -> None:
        """Raise unless an adapter of this name may be made; the error is the same whether or not it exists."""
        if not self.may(adapter, "teach"):
            raise Forbidden(f"the key {self.name!r} may not teach {adapter!r}; ask the server's administrator.", "name")


class Keys:
    def __init__(self, path: Path | None) -> None:
        self._callers: dict[str, Caller] | None = None
        if path is not None:
            self._callers = {
                entry.sha256: Caller(
                    entry.name, {a: frozenset(r) for a, r in entry.allow.items()}, entry.limits, entry.sees == "own"
                )
                for entry in _read(path).keys
            }

    @property
    def on(self) -> bool:
        return self._callers is not None

    def caller(self, request: Request) -> Caller:
        """By ``Authorization: Bearer …`` or ``X-API-Key``."""
        if self._callers is None:
            return Caller()
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if not key:
            raise NoKey("this server needs an API key: send it as 'Authorization: Bearer …' or 'X-API-Key: …'.")
        found = self._callers.get(_hash(key))
        if found is None:
            raise NoKey("this API key is unknown here; check for a missing character, or get a new one.")
        return found


def caller(
    request: Request,
    _bearer: Annotated[object, Security(HTTPBearer(auto_error=False, description="an API key"))] = None,
    _header: Annotated[object, Security(APIKeyHeader(name="X-API-Key", auto_error=False))] = None,
) -> Caller:
    """The caller (a FastAPI dependency). The security schemes are for the OpenAPI schema; ``Keys`` reads the
    headers."""
    return request.app.state.earnest.keys.caller(request)


Who = Annotated[Caller, Depends(caller)]


def _read(path: Path) -> KeyFile:
    from earnest.config.loading import check_mapping
    from earnest.config.text import parse_file

    found = check_mapping(KeyFile, parse_file(path))
    for what in ("name", "sha256"):
        values = [getattr(k, what) for k in found.keys]
        if len(set(values)) < len(values):
            raise ConfigError(f"--keys {path}: two keys have the same {what}; each needs its own.")
    return found


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def new_key(name: str, allow: str = "*") -> tuple[str, str]:
    """(a fresh key, its entry for the file of keys). The key is shown once and stored nowhere."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise ConfigError(f"{name!r} is not a valid name for a key; use letters, digits, '.', '-' and '_'.")
    key = PREFIX + secrets.token_urlsafe(32)
    lines = (f"  - name: {name}", f'    sha256: "{_hash(key)}"')
    return key, "\n".join((*lines, f'    allow: {{"{allow}": [read, teach, delete], base: [read]}}'))
