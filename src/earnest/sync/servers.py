"""An HTTP server as the sampler of a run: `earnest serve`, vLLM or SGLang (``sync.server`` has the requests)."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from earnest.engines.base import Rollout
from earnest.errors import SamplingError
from earnest.models import SampleSpec
from earnest.seeds import derive
from earnest.sync.base import SamplerLost, Weights
from earnest.sync.server import Choice, RequestRefused, Server

MOST = 16
"""Completions in one request."""
AT_ONCE = 8
"""Requests under way together."""


class ServerSampler:
    """A server as a ``Sampler``. Every version is pushed under a name of its own, since servers keep caches by name.
    Weights of the whole model replace the base of a vLLM; it gets its own again when the run ends."""

    def __init__(self, server: Server) -> None:
        server.require_pushes()
        self.server = server
        self.place = f"the sampler at {server.url}"
        self.plain: bool | None = server.kind != "earnest"
        self._run = secrets.token_hex(4)
        self._weights: Weights | None = None
        self._loaded: list[str] = []  # names on the server, the newest last
        self._whole: str | None = None  # the weights that replace the base of the server

    def push(self, weights: Weights) -> None:
        """Load these weights under a new name. The version before stays until ``sample`` uses this one: a push that
        fails its probe leaves the server as it was."""
        name = f"earnest-{self._run}-v{weights.version}-{weights.digest[:8]}"
        if weights.whole:
            self.server.replace(name, weights)
            self._whole = name
        else:
            self.server.load(name, weights)
            self._loaded.append(name)
        self._weights = weights

    def restart(self) -> None:
        """Find the server again. What was loaded is forgotten: a server that was started again has no adapters."""
        self._loaded.clear()
        self.server.models()

    def close(self) -> None:
        """Unload this run's adapters, where the server still answers."""
        for name in self._loaded:
            with suppress(SamplingError):
                self.server.unload(name)
        self._loaded.clear()
        if self._whole is not None:
            with suppress(SamplingError):
                self.server.reload(self.server.root, "base")
            self._whole = None

    @property
    def _model(self) -> str:
        """What a request names to get the weights that were pushed last."""
        return self.server.base if self._whole is not None else self.server.model(self._loaded[-1])

    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        model = self._model
        return [value for row in rows for value in self.server.score(model, row)]

    def sample(self, prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec) -> list[Rollout]:
        """A request has one prompt and a seed of its own: with one seed a server would give equal prompts equal
        answers."""
        if spec.stop:
            raise SamplingError("sampler: stop strings end completions inside a token on a server; leave them out.")
        assert self._weights is not None, "push comes first"
        while len(self._loaded) > 1:
            self.server.unload(self._loaded[0])
            del self._loaded[0]
        ends = spec.ends(self._weights.policy)
        parts = [(i, first) for i in range(len(prompts)) for first in range(0, n, MOST)]
        try:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                answers = pool.map(lambda part: self._request(prompts[part[0]], part, n, spec, ends), parts)
                found = [rollout for answer in answers for rollout in answer]
                if self._whole is not None and (held := self.server.holds()) != self._whole:
                    raise SamplerLost(f"{self.place} has the weights {held!r} in place of {self._whole!r}.")
                return found
        except RequestRefused as error:
            if error.status != 404:
                raise
            raise SamplerLost(f"{self.place} no longer has {self._model}; was it started again?") from None

    def _request(
        self, prompt: Sequence[int], part: tuple[int, int], n: int, spec: SampleSpec, ends: Collection[int]
    ) -> list[Rollout]:
        """Up to ``MOST`` of the ``n`` completions; ``part`` is the prompt's number and the first completion's."""
        i, first = part
        own = replace(spec, seed=derive(spec.seed, f"sampler {i}", first))
        model = self._model
        found = self.server.complete(model, prompt, min(MOST, n - first), own, ends)
        return [self._rollout(choice, prompt, (i, first + k), spec, ends) for k, choice in enumerate(found)]

    def _rollout(
        self, found: Choice, prompt: Sequence[int], place: tuple[int, int], spec: SampleSpec, ends: Collection[int]
    ) -> Rollout:
        assert self._weights is not None
        stopped = found.finish == "stop"
        tokens = found.tokens
        if not tokens or stopped != (tokens[-1] in ends) or (not stopped and len(tokens) != spec.max_new_tokens):
            raise SamplingError(
                f"sampler: {self.server.url} ended a completion of {len(tokens)} tokens with {found.finish!r}, which "
                f"is neither the policy's end of turn nor max_new_tokens={spec.max_new_tokens}; does it have another "
                "chat template, or a shorter context?"
            )
        finish: Literal["stop", "length"] = "stop" if stopped else "length"
        version, temperature = self._weights.version, spec.temperature or 1.0
        return Rollout(*place, tuple(prompt), tokens, found.logprobs, finish, version, temperature)
