"""A chat endpoint in OpenAI's format, with retries (``earnest.http``) and a count of its tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from earnest import http
from earnest.replay.errors import EndpointError
from earnest.replay.traces import Message

if TYPE_CHECKING:
    import httpx


class RetriesExhausted(EndpointError):
    """Every try of one request failed; other requests may still succeed."""


@dataclass(frozen=True)
class Usage:
    """What a reply cost. Tokens are None where the endpoint does not report them."""

    tries: int = 1
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(frozen=True)
class Reply:
    """An assistant message as received, why it ended, and its cost."""

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
        """One answer. ``name`` names the request in errors and decides the waits between tries."""
        body: dict[str, Any] = {"model": self.model, "messages": [dict(m) for m in messages]}
        body |= {"temperature": temperature, "max_tokens": max_tokens}
        if tools:
            body["tools"] = [dict(t) for t in tools]
        if seed is not None:
            body["seed"] = seed
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        try:
            answer = self._client.call("POST", "/chat/completions", body, name=name, read=_reply)
        except http.Refused as error:
            hint = f" Is ${self.key} set to a key of this endpoint?" if error.status in (401, 403) else ""
            raise EndpointError(f"{url} refused with {error}.{hint}") from None
        except http.NoAnswer as error:
            raise RetriesExhausted(
                f"{self.base_url} failed {self.attempts} times on {name}; the last time: {error}."
            ) from None
        reply: Reply = answer.value
        return replace(reply, usage=replace(reply.usage, tries=answer.tries))

    @cached_property
    def _client(self) -> http.Client:
        if not self.base_url.startswith(("http://", "https://")):
            raise EndpointError(f"base_url {self.base_url!r} is not an http(s) address.")
        secret = os.environ.get(self.key, "").strip()
        return http.Client(self.base_url, secret, timeout=self.timeout, tries=self.attempts, backoff=self.backoff)


def _reply(response: httpx.Response) -> Reply:
    data = http.read_json(response)
    try:
        choice = data["choices"][0]
        message = choice["message"]
        usage = data.get("usage") or {}
        kept = {"role": "assistant", "content": message.get("content")}
    except (KeyError, IndexError, TypeError, AttributeError):
        raise http.Unusable(f"its answer has no choices[0].message: {str(data)[:200]}") from None
    if message.get("tool_calls"):
        kept["tool_calls"] = message["tool_calls"]
    tokens = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    counted = [int(t) if isinstance(t, (int, float)) else None for t in tokens]
    return Reply(kept, choice.get("finish_reason"), Usage(1, counted[0], counted[1]))
