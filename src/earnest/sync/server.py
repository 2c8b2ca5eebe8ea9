"""An HTTP server that samples: `earnest serve`, vLLM, SGLang, or another one with OpenAI's completions and token ids.

Prompts go out as token ids and completions come back as token ids with the log-prob of each: text would be tokenized
again, and a policy gradient on other tokens than those sampled is wrong without an error. A server without token ids is
refused.

    POST /v1/completions   prompt=[ids], logprobs=1, return_token_ids=true      sampling
    POST /v1/completions   prompt=[ids], logprobs=1, echo=true, max_tokens=0    the log-probs of a given text
    POST /v1/load_lora_adapter, /v1/unload_lora_adapter                         vLLM (SGLang: without /v1)
    POST /v1/upload_lora_adapter                                                earnest: no common folder is needed
    POST /pause, /collective_rpc, /reset_prefix_cache, /update_weight_version, /resume    vLLM: all weights of the model
    POST /pause?mode=abort, /resume (vLLM), /v1/abort_lora_adapter (earnest)    end what is under way, keep its tokens
"""

from __future__ import annotations

import io
import math
import shutil
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

from earnest.errors import ConfigError, SamplingError
from earnest.http import Client, NoAnswer, Refused, read_json
from earnest.models import SampleSpec
from earnest.sync.base import Weights

KINDS = ("earnest", "vllm", "sglang")
"""The servers that adapters can be pushed to, by the owner of their models."""
EXACT = (
    "Use `earnest serve`, a vLLM with return_token_ids (0.10.2 or later), or an SGLang with it (July 2026): text alone "
    "would be tokenized again, to other tokens than those that were sampled."
)


class RequestRefused(SamplingError):
    """The server answered with an error status."""

    def __init__(self, sentence: str, error: Refused) -> None:
        super().__init__(sentence)
        self.status, self.text, self.again = error.status, error.text, error.tries > 1


@dataclass(frozen=True)
class Choice:
    """One completion as the server gave it: exact tokens with a finite log-prob each."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str
    text: str


class Server:
    """Requests to one server. ``base`` is the name of the model without an adapter.

    ``key`` is the name of an environment variable, ``secret`` its value. ``folder`` is where vLLM and SGLang read
    adapters; both machines see it under the same path.
    """

    def __init__(
        self, url: str, *, folder: str | None = None, key: str = "", secret: str = "", timeout: float = 600.0
    ) -> None:
        self.url, self.folder, self.key = url.rstrip("/").removesuffix("/v1"), folder, key
        self.http = Client(self.url, secret, timeout=timeout)
        listed = self.models()
        if not listed:
            raise SamplingError(f"sampler: {self.url}/v1/models lists no model; does the key in ${key} allow any?")
        self.kind, self.base = str(listed[0].get("owned_by")), str(listed[0]["id"])
        self.root = str(listed[0].get("root") or "")
        """The folder or name from which vLLM loaded its base."""

    def models(self) -> list[Mapping[str, Any]]:
        found = self.call("GET", "/v1/models")
        listed = found.get("data") if isinstance(found, dict) else None
        return listed if isinstance(listed, list) else []

    def require_pushes(self) -> None:
        """Raise if adapters cannot be pushed to this server."""
        if self.kind not in KINDS:
            raise SamplingError(
                f"sampler: the models of {self.url} belong to {self.kind!r}; adapters can be pushed to "
                f"{', '.join(KINDS)}."
            )
        if self.kind != "earnest" and self.folder is None:
            raise ConfigError(
                f"sampler.folder: {self.kind} reads adapters from a folder that it shares with this machine; name it."
            )

    def load(self, name: str, weights: Weights) -> None:
        """Give the server these weights under ``name``, which must be free."""
        files = weights.files(plain=self.kind != "earnest")
        if self.kind == "earnest":
            path = f"/v1/upload_lora_adapter?lora_name={quote(name)}&policy_version={weights.version}"
            self._change(path, _zipped(files), already_loaded)
            return
        body = {"lora_name": name, "lora_path": self._write(name, files)}
        self._change(f"{self._prefix()}/load_lora_adapter", body, already_loaded)

    def _write(self, name: str, files: Mapping[str, bytes]) -> str:
        """The path of a folder with these files that the server reads, too."""
        assert self.folder is not None
        place = Path(self.folder).resolve() / name
        place.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (place / file).write_bytes(content)
        return str(place)

    def replace(self, name: str, weights: Weights) -> None:
        """Give the server these weights of the whole model, as the version ``name`` of its base."""
        if self.kind != "vllm":
            raise ConfigError(
                f"sampler.url: this run trains weights of the model itself ({weights.adapter.variant.name}), and "
                f"earnest can send all weights to vLLM only, not to {self.kind}; sample on Ray (sampling.workers) or "
                "through a bucket instead."
            )
        place = self._write(name, weights.files(plain=True))
        try:
            self.reload(place, name)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def reload(self, place: str, name: str) -> None:
        """Let vLLM read the weights in this folder in place of its own: no request is under way meanwhile, and none
        finds the keys and values of the old weights."""
        try:
            self._change("/pause?mode=wait", {})
            try:
                self._change("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": place}})
                self._change("/reset_prefix_cache", {})
                self._change("/update_weight_version", {"new_version": name})
            finally:
                self._change("/resume", {})
        except RequestRefused as error:
            if error.status not in (404, 405):
                raise
            raise ConfigError(
                f"sampler.url: {self.url} has no route for the weights of the whole model; start vLLM with "
                "VLLM_SERVER_DEV_MODE=1, or train an adapter."
            ) from None

    def holds(self) -> str:
        """The name of the weights that vLLM read last; a server that was started again has another one."""
        return str(self.call("GET", "/weight_info").get("weight_version"))

    @cached_property
    def interrupts(self) -> bool:
        """Whether completions under way can be ended so that their tokens are kept: vLLM has the routes for it with
        VLLM_SERVER_DEV_MODE=1."""
        if self.kind != "vllm":
            return self.kind == "earnest"
        try:
            self.call("GET", "/is_paused")
        except RequestRefused:
            return False
        return True

    def interrupt(self, model: str) -> None:
        """End the completions of ``model`` that are under way: each is answered with its tokens so far and the
        finish_reason `abort`. vLLM also ends those of other models."""
        if self.kind == "earnest":
            self._change("/v1/abort_lora_adapter", {"lora_name": model})
            return
        try:
            self._change("/pause?mode=abort", {})
        finally:
            self._change("/resume", {})

    def unload(self, name: str) -> None:
        self._change(f"{self._prefix()}/unload_lora_adapter", {"lora_name": name}, already_gone)
        if self.folder is not None and self.kind != "earnest":
            shutil.rmtree(Path(self.folder) / name, ignore_errors=True)

    def model(self, name: str) -> str:
        """What a request names to get the adapter ``name``."""
        return f"{self.base}:{name}" if self.kind == "sglang" else name

    def _prefix(self) -> str:
        return "" if self.kind == "sglang" else "/v1"

    def score(self, model: str, tokens: Sequence[int]) -> list[float]:
        """log π(token_t | token_<t) for t ≥ 1 at temperature 1."""
        body = {"model": model, "prompt": list(tokens), "max_tokens": 0, "echo": True, "logprobs": 1}
        found = self._choices({**body, "temperature": 1.0}, 1)[0]
        values = (found.get("logprobs") or {}).get("token_logprobs")
        if not isinstance(values, list) or len(values) < len(tokens) or not _finite(values[1 : len(tokens)]):
            raise SamplingError(
                f"sampler: {self.url} does not give the log-probs of a prompt (echo with logprobs), so its weights "
                "cannot be checked; use `earnest serve` or vLLM."
            )
        return [float(v) for v in values[1 : len(tokens)]]

    def complete(
        self, model: str, prompt: Sequence[int], n: int, spec: SampleSpec, ends: Collection[int], **more: Any
    ) -> list[Choice]:
        """``n`` completions with the settings and the seed of ``spec``. Every setting is in the request, since servers
        have defaults of their own."""
        body: dict[str, Any] = {"model": model, "prompt": list(prompt), "max_tokens": spec.max_new_tokens, "n": n}
        body |= {name: getattr(spec, name) for name in ("temperature", "top_p", "top_k", "seed")}
        body |= {"logprobs": 1, "return_token_ids": True}
        if self.kind != "earnest":
            body |= {"top_k": spec.top_k or -1, "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": sorted(ends)}
        return [self._choice(choice, prompt) for choice in self._choices(body | more, n)]

    def _choice(self, choice: Mapping[str, Any], prompt: Sequence[int]) -> Choice:
        tokens, values = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if not isinstance(tokens, list) or not all(type(t) is int for t in tokens):
            raise SamplingError(f"sampler: {self.url} gives no exact token ids of what it sampled. {EXACT}")
        if not isinstance(values, list) or len(values) != len(tokens) or not _finite(values):
            raise SamplingError(f"sampler: {self.url} gives no log-prob for each token that it sampled. {EXACT}")
        if choice.get("prompt_token_ids") not in (None, list(prompt)):
            raise SamplingError(
                f"sampler: {self.url} answered another prompt than the tokens that it was given. Does it, or a program "
                "in front of it, tokenize prompts again?"
            )
        logprobs = tuple(float(v) for v in values)
        return Choice(tuple(tokens), logprobs, str(choice.get("finish_reason")), str(choice.get("text")))

    def _choices(self, body: Mapping[str, Any], n: int) -> list[Mapping[str, Any]]:
        found = self.call("POST", "/v1/completions", body)
        choices = found.get("choices") if isinstance(found, dict) else None
        if not isinstance(choices, list) or len(choices) != n:
            raise SamplingError(f"sampler: {self.url} gave another number of completions than the {n} requested.")
        prompts = found.get("prompt_token_ids")  # earnest: of all prompts; vLLM: in each choice
        shared = {"prompt_token_ids": prompts[0]} if isinstance(prompts, list) and len(prompts) == 1 else {}
        return sorted(({**shared, **c} for c in choices), key=lambda c: c.get("index", 0))

    def _change(self, path: str, body: Mapping[str, Any] | bytes, done: Any = lambda *_: False) -> None:
        """A request whose answer was lost may have been carried out: ``done`` recognises the refusals that mean it."""
        try:
            self.call("POST", path, body, lambda response: response.text)
        except RequestRefused as error:
            if not done(error.status, error.text, error.again):
                raise

    def call(self, method: str, path: str, body: Mapping[str, Any] | bytes | None = None, read: Any = read_json) -> Any:
        """What the server answers: JSON, or what ``read`` makes of the response."""
        try:
            return self.http.call(method, path, body, read=read).value
        except Refused as error:
            hint = f" Is ${self.key} set to a key of it?" if error.status in (401, 403) else ""
            raise RequestRefused(f"sampler: {self.url}{path} refused with {error}{hint}", error) from None
        except NoAnswer as error:
            raise SamplingError(
                f"sampler: {self.url}{path} failed {self.http.tries} times; the last time: {error}. Is it running?"
            ) from None


def already_loaded(status: int, text: str, again: bool) -> bool:
    """A push sent again finds its name taken: the first one arrived. The probe looks at its weights."""
    return again and status in (400, 409) and "already" in text


def already_gone(status: int, text: str, again: bool) -> bool:
    """Whether the adapter is unloaded already; SGLang answers 400 to it, and to other errors."""
    return status == 404 or (status == 400 and again and "does not exist" in text)


def _zipped(files: Mapping[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return content.getvalue()


def _finite(values: Sequence[Any]) -> bool:
    return all(isinstance(v, (int, float)) and math.isfinite(v) for v in values)
