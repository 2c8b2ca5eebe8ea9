"""Six faults of a sampling server, planted by a proxy in front of a real one (`earnest serve` or vLLM)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

from earnest.models.loading import load_text
from tests.sync.served import Proxy

PREFIX = 4
"""Tokens of a prompt's first block in the planted cache."""


def dropped_push(proxy: Proxy) -> None:
    """The first push is applied; later ones are answered with 200, and their names get the first one's weights."""
    first: list[str] = []

    def before(path: str, body: bytes) -> tuple[str, bytes] | None:
        name = _pushed(path, body)
        if name is not None or "unload_lora_adapter" in path:
            if first or name is None:
                return None
            first.append(name)
        return path, _renamed(path, body, lambda model: first[0] if model.startswith("earnest-") else model)

    proxy.before = before


def old_cache(proxy: Proxy) -> None:
    """A prompt whose first tokens were sampled under one adapter is sampled under it ever after. Scores are right, as
    with a server that does not read its cache for them."""
    seen: dict[tuple[int, ...], str] = {}

    def before(path: str, body: bytes) -> tuple[str, bytes] | None:
        if "unload_lora_adapter" in path:
            return None
        wanted = _sampling(path, body)
        if wanted is not None and wanted["model"].startswith("earnest-"):
            wanted["model"] = seen.setdefault(tuple(wanted["prompt"][:PREFIX]), wanted["model"])
            body = json.dumps(wanted).encode()
        return path, body

    proxy.before = before


def raw_logprobs(proxy: Proxy) -> None:
    """Log-probs before temperature."""
    asked = threading.local()

    def before(path: str, body: bytes) -> tuple[str, bytes] | None:
        asked.body = _sampling(path, body)
        return path, body

    def after(path: str, found: Any) -> Any:
        wanted = asked.body
        for choice in found["choices"] if wanted is not None else ():
            row = [*wanted["prompt"], *choice["token_ids"]]
            score = {"model": wanted["model"], "prompt": row, "max_tokens": 0, "echo": True, "logprobs": 1}
            _, _, raw = proxy.forward("POST", "/v1/completions", json.dumps({**score, "temperature": 1.0}).encode())
            values = json.loads(raw)["choices"][0]["logprobs"]["token_logprobs"]
            choice["logprobs"]["token_logprobs"] = values[len(wanted["prompt"]) : len(row)]
        return found

    proxy.before, proxy.after = before, after


def base_model(proxy: Proxy) -> None:
    """Every adapter is accepted, and the base model answers."""

    def base() -> str:
        _, _, raw = proxy.forward("GET", "/v1/models", b"")
        return str(json.loads(raw)["data"][0]["id"])

    proxy.before = lambda path, body: (path, _renamed(path, body, lambda _: base()))


def other_tokenizer(proxy: Proxy) -> None:
    """Prompts are decoded and tokenized again, one character at a time."""
    text = load_text("nano", lambda _: None)

    def again(tokens: list[int]) -> list[int]:
        return [token for c in text.tokenizer.decode(tokens) for token in text.encode(c)]

    def before(path: str, body: bytes) -> tuple[str, bytes] | None:
        wanted = _sampling(path, body)
        if wanted is not None:
            body = json.dumps({**wanted, "prompt": again(wanted["prompt"])}).encode()
        return path, body

    proxy.before = before


def top_p(proxy: Proxy) -> None:
    """A top-p that was not requested, as servers take it from a generation_config."""

    def before(path: str, body: bytes) -> tuple[str, bytes] | None:
        wanted = _sampling(path, body)
        return path, body if wanted is None else json.dumps({**wanted, "top_p": 0.6}).encode()

    proxy.before = before


FAULTS: dict[str, tuple[Callable[[Proxy], None], str, str]] = {
    "dropped push": (dropped_push, "perturbation", "still runs old weights"),
    "old KV cache": (old_cache, "prefix cache", "a KV cache that they filled"),
    "raw log-probs": (raw_logprobs, "log-probs", "those before temperature"),
    "base model": (base_model, "adapter", "the base model: no adapter is applied"),
    "other tokenizer": (other_tokenizer, "token ids", "another prompt than the tokens that it was given"),
    "top-p": (top_p, "log-probs", "top-p, top-k or min-p that was not requested"),
}
"""What plants the fault; the law of the contract that finds it; what a run stops with."""


def _sampling(path: str, body: bytes) -> dict[str, Any] | None:
    """The request, where it samples (and does not score)."""
    wanted = json.loads(body) if path == "/v1/completions" else {"echo": True}
    return None if wanted.get("echo") else wanted


def _pushed(path: str, body: bytes) -> str | None:
    """The name that a push gives."""
    if path.startswith("/v1/upload_lora_adapter"):
        return parse_qs(urlsplit(path).query)["lora_name"][0]
    return str(json.loads(body)["lora_name"]) if path == "/v1/load_lora_adapter" else None


def _renamed(path: str, body: bytes, name: Callable[[str], str]) -> bytes:
    if path != "/v1/completions":
        return body
    wanted = json.loads(body)
    return json.dumps({**wanted, "model": name(wanted["model"])}).encode()
