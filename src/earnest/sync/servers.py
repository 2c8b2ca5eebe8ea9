"""Sampling on an HTTP server: `earnest serve`, vLLM or SGLang, through OpenAI's completions.

Prompts go out as token ids and completions come back as token ids with the log-prob of each: text would be tokenized
again, and a policy gradient on other tokens than those sampled is wrong without an error. A server without token ids is
refused.

    POST /v1/completions   prompt=[ids], logprobs=1, return_token_ids=true      sampling
    POST /v1/completions   prompt=[ids], logprobs=1, echo=true, max_tokens=0    the log-probs of a given text
    POST /v1/load_lora_adapter, /v1/unload_lora_adapter                         vLLM (SGLang: without /v1)
    POST /v1/upload_lora_adapter                                                earnest: no common folder is needed
"""

from __future__ import annotations

import io
import math
import secrets
import shutil
import tempfile
import zipfile
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from earnest.engines.base import Rollout
from earnest.errors import ConfigError, SamplingError
from earnest.http import Client, NoAnswer, Refused
from earnest.models import SampleSpec
from earnest.seeds import derive
from earnest.sync.base import Weights

Kind = Literal["earnest", "vllm", "sglang"]
KINDS: tuple[Kind, ...] = ("earnest", "vllm", "sglang")
MOST = 16
"""Completions in one request."""
AT_ONCE = 8
"""Requests under way together."""
EXACT = (
    "Use `earnest serve`, a vLLM with return_token_ids (0.10.2 or later), or an SGLang with it (July 2026): text alone "
    "would be tokenized again, to other tokens than those that were sampled."
)


class ServerSampler:
    """A server as a ``Sampler``. Every version is pushed under a name of its own, since servers keep caches by name.

    ``key`` is the name of an environment variable, ``secret`` its value. ``folder`` is where vLLM and SGLang read
    adapters; both machines see it under the same path.
    """

    def __init__(
        self, url: str, *, folder: str | None = None, key: str = "", secret: str = "", timeout: float = 600.0
    ) -> None:
        self.url, self.folder, self.key = url.rstrip("/").removesuffix("/v1"), folder, key
        self.place = f"the sampler at {self.url}"
        self.http = Client(self.url, secret, timeout=timeout)
        self._run = secrets.token_hex(4)
        self._weights: Weights | None = None
        self._loaded: list[str] = []  # names on the server, the newest last
        models = self._call("GET", "/v1/models")
        listed = models.get("data") if isinstance(models, dict) else None
        if not isinstance(listed, list) or not listed:
            raise SamplingError(f"sampler: {self.url}/v1/models lists no model; does the key in ${key} allow any?")
        owner = listed[0].get("owned_by")
        if owner not in KINDS:
            raise SamplingError(
                f"sampler: the models of {self.url} belong to {owner!r}; adapters can be pushed to {', '.join(KINDS)}."
            )
        self.kind: Kind = owner
        self.base = str(listed[0]["id"])
        if self.kind != "earnest" and folder is None:
            raise ConfigError(
                f"sampler.folder: {self.kind} reads adapters from a folder that it shares with this machine; name it."
            )

    # --- weights ------------------------------------------------------------------------------------------------------

    def push(self, weights: Weights) -> None:
        """Load these weights under a new name. The version before stays until ``sample`` uses this one: a push that
        fails its probe leaves the server as it was."""
        name = f"earnest-{self._run}-v{weights.version}-{weights.digest[:8]}"
        self.load(name, weights)
        self._loaded.append(name)
        self._weights = weights

    def load(self, name: str, weights: Weights) -> None:
        """Give the server these weights under ``name``, which must be free."""
        if self.kind == "earnest":
            with tempfile.TemporaryDirectory(prefix="earnest-push-") as scratch:
                body = _zipped(weights.adapter.save(Path(scratch) / name, weights.policy.name))
            self._change(f"/v1/upload_lora_adapter?lora_name={quote(name)}", body, already_loaded)
            return
        assert self.folder is not None
        place = weights.adapter.export_lora(Path(self.folder).resolve() / name, weights.policy.name)
        body_ = {"lora_name": name, "lora_path": str(place)}
        self._change(f"{self._prefix()}/load_lora_adapter", body_, already_loaded)

    def unload(self, name: str) -> None:
        self._change(f"{self._prefix()}/unload_lora_adapter", {"lora_name": name}, already_gone)
        if self.folder is not None and self.kind != "earnest":
            shutil.rmtree(Path(self.folder) / name, ignore_errors=True)

    def restart(self) -> None:
        raise SamplingError(f"{self.place} is gone; start it again, then resume the run.")

    def close(self) -> None:
        """Unload this run's adapters, where the server still answers."""
        for name in self._loaded:
            with suppress(SamplingError):
                self.unload(name)
        self._loaded.clear()

    def _prefix(self) -> str:
        return "" if self.kind == "sglang" else "/v1"

    def _model(self) -> str:
        return f"{self.base}:{self._loaded[-1]}" if self.kind == "sglang" else self._loaded[-1]

    # --- log-probs and samples ----------------------------------------------------------------------------------------

    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        return [value for row in rows for value in self._score(row)]

    def _score(self, tokens: Sequence[int]) -> list[float]:
        body = {"model": self._model(), "prompt": list(tokens), "max_tokens": 0, "echo": True, "logprobs": 1}
        found = self._choices({**body, "temperature": 1.0}, 1)[0]
        values = (found.get("logprobs") or {}).get("token_logprobs")
        if not isinstance(values, list) or len(values) < len(tokens) or not _finite(values[1 : len(tokens)]):
            raise SamplingError(
                f"sampler: {self.url} does not give the log-probs of a prompt (echo with logprobs), so its weights "
                "cannot be checked; use `earnest serve` or vLLM."
            )
        return [float(v) for v in values[1 : len(tokens)]]

    def sample(self, prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec) -> list[Rollout]:
        """A request has one prompt and a seed of its own: with one seed a server would give equal prompts equal
        answers."""
        if spec.stop:
            raise SamplingError("sampler: stop strings end completions inside a token on a server; leave them out.")
        assert self._weights is not None, "push comes first"
        while len(self._loaded) > 1:
            self.unload(self._loaded[0])
            del self._loaded[0]
        ends = spec.ends(self._weights.policy)
        parts = [(i, first) for i in range(len(prompts)) for first in range(0, n, MOST)]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = pool.map(lambda part: self._request(prompts[part[0]], part, n, spec, ends), parts)
            return [rollout for answer in answers for rollout in answer]

    def _request(
        self, prompt: Sequence[int], part: tuple[int, int], n: int, spec: SampleSpec, ends: Collection[int]
    ) -> list[Rollout]:
        """Up to ``MOST`` of the ``n`` completions; ``part`` is the prompt's number and the first completion's. Every
        setting is in the request, since servers have defaults of their own."""
        i, first = part
        count = min(MOST, n - first)
        body: dict[str, Any] = {
            "model": self._model(),
            "prompt": list(prompt),
            "max_tokens": spec.max_new_tokens,
            "n": count,
            "temperature": spec.temperature,
            "top_p": spec.top_p,
            "top_k": spec.top_k,
            "seed": derive(spec.seed, f"sampler {i}", first),
            "logprobs": 1,
            "return_token_ids": True,
        }
        if self.kind != "earnest":
            body |= {"top_k": spec.top_k or -1, "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": sorted(ends)}
        made = [self._rollout(choice, prompt, spec, ends) for choice in self._choices(body, count)]
        return [replace(r, prompt_index=i, sample_index=first + k) for k, r in enumerate(made)]

    def _rollout(
        self, choice: Mapping[str, Any], prompt: Sequence[int], spec: SampleSpec, ends: Collection[int]
    ) -> Rollout:
        assert self._weights is not None
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
                f"{spec.max_new_tokens}; does it have another chat template, or a shorter context?"
            )
        logprobs = tuple(float(v) for v in values)
        version, temperature = self._weights.version, spec.temperature or 1.0
        finish: Literal["stop", "length"] = "stop" if stopped else "length"
        return Rollout(0, 0, tuple(prompt), tuple(tokens), logprobs, finish, version, temperature)

    def _choices(self, body: Mapping[str, Any], n: int) -> list[Mapping[str, Any]]:
        found = self._call("POST", "/v1/completions", body)
        choices = found.get("choices") if isinstance(found, dict) else None
        if not isinstance(choices, list) or len(choices) != n:
            raise SamplingError(f"sampler: {self.url} gave another number of completions than the {n} requested.")
        return sorted(choices, key=lambda c: c.get("index", 0))

    # --- requests -----------------------------------------------------------------------------------------------------

    def _change(self, path: str, body: Mapping[str, Any] | bytes, done: Any) -> None:
        """A request whose answer was lost may have been carried out: ``done`` recognises the refusals that mean it."""
        try:
            self.http.call("POST", path, body, read=lambda response: response.text)
        except Refused as error:
            if not done(error.status, error.text, error.tries > 1):
                raise self._refusal(path, error) from None
        except NoAnswer as error:
            raise self._no_answer(path, error) from None

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            return self.http.call(method, path, body).value
        except Refused as error:
            raise self._refusal(path, error) from None
        except NoAnswer as error:
            raise self._no_answer(path, error) from None

    def _refusal(self, path: str, error: Refused) -> SamplingError:
        hint = f" Is ${self.key} set to a key of it?" if error.status in (401, 403) else ""
        return SamplingError(f"sampler: {self.url}{path} refused with {error}{hint}")

    def _no_answer(self, path: str, error: NoAnswer) -> SamplingError:
        return SamplingError(
            f"sampler: {self.url}{path} failed {self.http.tries} times; the last time: {error}. Is it running?"
        )


def already_loaded(status: int, text: str, again: bool) -> bool:
    """A push sent again finds its name taken: the first one arrived. The probe looks at its weights."""
    return again and status in (400, 409) and "already" in text


def already_gone(status: int, text: str, again: bool) -> bool:
    """Whether the adapter is unloaded already; SGLang answers 400 to it, and to other errors."""
    return status == 404 or (status == 400 and again and "does not exist" in text)


def _zipped(folder: Path) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path in sorted(folder.iterdir()):
            archive.write(path, path.name)
    return content.getvalue()


def _finite(values: Sequence[Any]) -> bool:
    return all(isinstance(v, (int, float)) and math.isfinite(v) for v in values)
