"""A server that samples for a run: `earnest serve`, vLLM or SGLang, through OpenAI's completions.

Prompts go out as token ids and completions come back as token ids with the log-prob of each: text would be tokenized
again, and a policy gradient on other tokens than those sampled is silently wrong. A server that cannot is refused.

    POST /v1/completions   prompt=[ids], logprobs=1, return_token_ids=true      sampling
    POST /v1/completions   prompt=[ids], logprobs=1, echo=true, max_tokens=0    what it thinks of a given text
    POST /v1/load_lora_adapter, /v1/unload_lora_adapter                         vLLM (SGLang: without /v1)
    POST /v1/upload_lora_adapter                                                earnest: no common folder is needed
"""

from __future__ import annotations

import http.client
import io
import json
import math
import os
import shutil
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from earnest.adapters import Adapter
from earnest.config.schema import SamplerConfig
from earnest.errors import ConfigError, SamplingError
from earnest.models import SampleSpec

Kind = Literal["earnest", "vllm", "sglang"]
Done = Callable[[int, str, bool], bool]
"""(status, what was said, whether the request was sent before) → whether what was asked for is the case."""
KINDS: tuple[Kind, ...] = ("earnest", "vllm", "sglang")
TRIES = 6
MOST = 16
"""Completions in one request."""
EXACT = (
    "Use `earnest serve`, a vLLM that knows return_token_ids (0.10.2 or later), or an SGLang that does (July 2026): "
    "text alone would be tokenized again, to other tokens than those that were sampled."
)


@dataclass(frozen=True)
class Sampled:
    """One completion as the server gave it."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length"]


class Endpoint:
    """The server's three dialects behind one set of words."""

    def __init__(self, config: SamplerConfig) -> None:
        self.config = config
        self.url = config.url.rstrip("/").removesuffix("/v1")
        models = self._call("/v1/models")
        listed = models.get("data") if isinstance(models, dict) else None
        if not isinstance(listed, list) or not listed:
            raise SamplingError(
                f"sampler: {self.url}/v1/models lists no model; does the key in ${config.key} allow any?"
            )
        owner = listed[0].get("owned_by")
        if owner not in KINDS:
            raise SamplingError(
                f"sampler: the models of {self.url} belong to {owner!r}; adapters can be pushed to {', '.join(KINDS)}."
            )
        self.kind: Kind = owner
        self.base = str(listed[0]["id"])
        if self.kind != "earnest" and config.folder is None:
            raise ConfigError(
                f"sampler.folder: {self.kind} reads adapters from a folder that it shares with this machine; name it."
            )

    # --- adapters -----------------------------------------------------------------------------------------------------

    def load(self, name: str, adapter: Adapter, base_model: str, scratch: Path) -> None:
        """Give the server these weights under this name, which nobody else has ever used."""
        if self.kind == "earnest":
            folder = adapter.save(scratch / name, base_model)
            self._call(f"/v1/upload_lora_adapter?lora_name={quote(name)}", _zipped(folder), done=_there)
            shutil.rmtree(folder)
            return
        assert self.config.folder is not None
        folder = adapter.export_lora(Path(self.config.folder).resolve() / name, base_model)
        self._call(f"{self._prefix()}/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, done=_there)

    def unload(self, name: str) -> None:
        self._call(f"{self._prefix()}/unload_lora_adapter", {"lora_name": name}, done=_gone)
        if self.config.folder is not None and self.kind != "earnest":
            shutil.rmtree(Path(self.config.folder) / name, ignore_errors=True)

    def _prefix(self) -> str:
        return "" if self.kind == "sglang" else "/v1"

    def _model(self, name: str) -> str:
        return f"{self.base}:{name}" if self.kind == "sglang" else name

    # --- log-probs and samples ----------------------------------------------------------------------------------------

    def score(self, name: str, tokens: Sequence[int]) -> list[float]:
        """log π(token_t | token_<t) for t ≥ 1, at temperature 1."""
        body = {"model": self._model(name), "prompt": list(tokens), "max_tokens": 0, "echo": True, "logprobs": 1}
        found = self._choices({**body, "temperature": 1.0}, 1)[0]
        values = (found.get("logprobs") or {}).get("token_logprobs")
        if not isinstance(values, list) or len(values) < len(tokens) or not _finite(values[1 : len(tokens)]):
            raise SamplingError(
                f"sampler: {self.url} does not give the log-probs of a prompt (echo with logprobs), so nobody could "
                "tell which weights it runs; use `earnest serve` or vLLM."
            )
        return [float(v) for v in values[1 : len(tokens)]]

    def sample(
        self, name: str, prompt: Sequence[int], n: int, spec: SampleSpec, ends: Collection[int]
    ) -> list[Sampled]:
        """``n`` completions; every setting is spelled out, for servers have defaults of their own."""
        body: dict[str, Any] = {
            "model": self._model(name),
            "prompt": list(prompt),
            "max_tokens": spec.max_new_tokens,
            "n": n,
            "temperature": spec.temperature,
            "top_p": spec.top_p,
            "top_k": spec.top_k,
            "seed": spec.seed,
            "logprobs": 1,
            "return_token_ids": True,
        }
        if self.kind != "earnest":
            body |= {"top_k": spec.top_k or -1, "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": sorted(ends)}
        return [self._sampled(choice, prompt, spec, ends) for choice in self._choices(body, n)]

    def _sampled(
        self, choice: Mapping[str, Any], prompt: Sequence[int], spec: SampleSpec, ends: Collection[int]
    ) -> Sampled:
        tokens, values = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if not isinstance(tokens, list) or not all(type(t) is int for t in tokens):
            raise SamplingError(f"sampler: {self.url} gives no exact token ids of what it sampled. {EXACT}")
        if not isinstance(values, list) or len(values) != len(tokens) or not _finite(values):
            raise SamplingError(f"sampler: {self.url} gives no log-prob for each token that it sampled. {EXACT}")
        if choice.get("prompt_token_ids") not in (None, list(prompt)):
            raise SamplingError(f"sampler: {self.url} answered another prompt than the tokens that it was given.")
        stopped = choice.get("finish_reason") == "stop"
        if not tokens or stopped != (tokens[-1] in ends) or (not stopped and len(tokens) != spec.max_new_tokens):
            raise SamplingError(
                f"sampler: {self.url} ended a completion of {len(tokens)} tokens with "
                f"{choice.get('finish_reason')!r}, which is neither the policy's end of turn nor max_new_tokens="
                f"{spec.max_new_tokens}; has it another chat template, or a shorter context?"
            )
        return Sampled(tuple(tokens), tuple(float(v) for v in values), "stop" if stopped else "length")

    def _choices(self, body: Mapping[str, Any], n: int) -> list[Mapping[str, Any]]:
        found = self._call("/v1/completions", body)
        choices = found.get("choices") if isinstance(found, dict) else None
        if not isinstance(choices, list) or len(choices) != n:
            raise SamplingError(f"sampler: {self.url} was asked for {n} completions and gave another number.")
        return sorted(choices, key=lambda c: c.get("index", 0))

    # --- the wire -----------------------------------------------------------------------------------------------------

    def _call(self, path: str, body: Mapping[str, Any] | bytes | None = None, *, done: Done | None = None) -> Any:
        """JSON, or text where the answer is none. Busy and away are tried again for a while; the rest is an error.

        A request whose answer was lost may have been carried out: ``done`` says which refusals mean that it was.
        """
        headers = {"Accept": "application/json"}
        if key := os.environ.get(self.config.key):
            headers["Authorization"] = f"Bearer {key}"
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        if raw is not None:
            headers["Content-Type"] = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        why = ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(min(8.0, 0.25 * 2**attempt))
            request = urllib.request.Request(self.url + path, raw, headers)
            try:
                with urllib.request.urlopen(request, timeout=self.config.timeout) as answer:
                    return _json(answer.read())
            except urllib.error.HTTPError as error:
                said = _said(error.read(2000))
                if done is not None and done(error.code, said, attempt > 0):
                    return said
                why = f"HTTP {error.code}: {said}"
                if error.code not in (429, 502, 503, 504):
                    way = f" Is ${self.config.key} set to a key of it?" if error.code in (401, 403) else ""
                    raise SamplingError(f"sampler: {self.url}{path} refused with {why}{way}") from None
            except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
                why = str(getattr(error, "reason", error))
        raise SamplingError(f"sampler: {self.url}{path} failed {TRIES} times; the last time: {why}. Is it running?")


def _there(status: int, said: str, again: bool) -> bool:
    """A push sent again, of a name that is there by now: the first one arrived. The probe looks at its weights."""
    return again and status in (400, 409) and "already" in said


def _gone(status: int, said: str, again: bool) -> bool:
    """Not there is what an unload is for; SGLang says 400 about it, and about much else."""
    return status == 404 or (status == 400 and again and "does not exist" in said)


def _zipped(folder: Path) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path in sorted(folder.iterdir()):
            archive.write(path, path.name)
    return content.getvalue()


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")


def _said(raw: bytes) -> str:
    found = _json(raw)
    message = found.get("error", found) if isinstance(found, dict) else found
    return str(message.get("message", message) if isinstance(message, dict) else message)


def _finite(values: Sequence[Any]) -> bool:
    return all(isinstance(v, (int, float)) and math.isfinite(v) for v in values)
