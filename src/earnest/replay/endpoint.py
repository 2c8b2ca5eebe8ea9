"""A chat endpoint in OpenAI's format: asked with retries, and with its tokens counted.

The wait before try k+1 is min(60, backoff·2^(k-1))·(½ + u/2), where the request decides u, or what the server's
Retry-After says, if that is longer.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from earnest.replay.errors import EndpointError
from earnest.replay.traces import Message

AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
LONGEST = 60.0


class Exhausted(EndpointError):
    """Every try failed; others may still succeed."""


@dataclass(frozen=True)
class Usage:
    """What a reply cost. Tokens are None where the endpoint does not say."""

    tries: int = 1
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(frozen=True)
class Reply:
    """An assistant message as it came, why it ended, and its cost."""

    message: Message
    finish: str | None
    usage: Usage


@dataclass(frozen=True)
class Endpoint:
    """``key`` is the name of an environment variable; a local server without keys gets none."""

    base_url: str
    model: str
    key: str = "OPENAI_API_KEY"
    attempts: int = 5
    backoff: float = 1.0
    timeout: float = 120.0

    def chat(
        self,
        messages: Sequence[Message],
        *,
        name: str,
        temperature: float,
        max_tokens: int,
        tools: Sequence[Message] = (),
        seed: int | None = None,
    ) -> Reply:
        """One answer. ``name`` says in errors what was asked, and decides the waits."""
        body: dict[str, Any] = {"model": self.model, "messages": [dict(m) for m in messages]}
        body |= {"temperature": temperature, "max_tokens": max_tokens}
        if tools:
            body["tools"] = [dict(t) for t in tools]
        if seed is not None:
            body["seed"] = seed
        why = ""
        for attempt in range(1, self.attempts + 1):
            try:
                return _reply(self._post(body), attempt)
            except _TryAgain as failure:
                why = str(failure)
                if attempt < self.attempts:
                    time.sleep(max(self.wait(name, attempt), failure.after))
        raise Exhausted(f"{self.base_url} failed {self.attempts} times on {name}; the last time: {why}.")

    def wait(self, name: str, attempt: int) -> float:
        """Seconds before the next try; the same for the same request."""
        digest = hashlib.sha256(f"{name} {attempt}".encode()).digest()
        u = int.from_bytes(digest[:4], "big") / 2**32
        return min(LONGEST, self.backoff * 2 ** (attempt - 1)) * (0.5 + u / 2)

    def _post(self, body: Mapping[str, Any]) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key := os.environ.get(self.key):
            headers["Authorization"] = f"Bearer {key}"
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        if not url.startswith(("http://", "https://")):
            raise EndpointError(f"base_url {self.base_url!r} is no http(s) address.")
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            said = error.read(500).decode(errors="replace").strip()
            if error.code in AGAIN:
                raise _TryAgain(f"HTTP {error.code} {said}", _seconds(error.headers.get("Retry-After"))) from None
            way_out = f" Is ${self.key} set to a key of this endpoint?" if error.code in (401, 403) else ""
            raise EndpointError(f"{url} refused with HTTP {error.code}: {said}.{way_out}") from None
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            raise _TryAgain(f"{type(error).__name__}: {getattr(error, 'reason', error)}") from None
        except ValueError as error:
            raise _TryAgain(f"its answer is not JSON ({error})") from None


class _TryAgain(Exception):
    """A failure that may pass; ``after`` is the least wait that the server asked for."""

    def __init__(self, why: str, after: float = 0.0) -> None:
        super().__init__(why)
        self.after = after


def _seconds(header: str | None) -> float:
    try:
        return min(LONGEST, max(0.0, float(header or 0)))
    except ValueError:  # an HTTP date: the own wait is long enough
        return 0.0


def _reply(data: Any, tries: int) -> Reply:
    try:
        choice = data["choices"][0]
        message = choice["message"]
        usage = data.get("usage") or {}
        kept = {"role": "assistant", "content": message.get("content")}
    except (KeyError, IndexError, TypeError, AttributeError):
        raise _TryAgain(f"its answer has no choices[0].message: {str(data)[:200]}") from None
    if message.get("tool_calls"):
        kept["tool_calls"] = message["tool_calls"]
    tokens = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    counted = [int(t) if isinstance(t, (int, float)) else None for t in tokens]
    return Reply(kept, choice.get("finish_reason"), Usage(tries, counted[0], counted[1]))
