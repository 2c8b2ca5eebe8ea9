"""An HTTP server as the sampler of a run: `earnest serve`, vLLM or SGLang (``sync.server`` has the requests)."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from earnest.errors import SamplingError
from earnest.models import SampleSpec
from earnest.rollouts.rollout import Rollout
from earnest.seeds import derive
from earnest.sync.base import SamplerLost, Weights
from earnest.sync.server import Choice, RequestRefused, Server

MOST = 16
"""Completions in one request."""
AT_ONCE, UNDER_WAY = 8, 64
"""Requests that are under way together; more where these have fewer than ``UNDER_WAY`` completions."""
LOOK = 0.1
"""Seconds between two looks for newer weights while completions are under way."""
ABORTED = "abort"
"""The finish_reason of a completion that was ended before its last token."""


@dataclass(frozen=True)
class _Part:
    """One request: ``count`` completions of the prompt with this place, from the number ``first`` on."""

    prompt: Sequence[int]
    place: int
    first: int
    count: int
    spec: SampleSpec
    ends: frozenset[int]


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

    @property
    def interrupts(self) -> bool:
        """Whether ``sample_until`` can return before the completions are finished."""
        return self.server.interrupts

    def sample(self, prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec) -> list[Rollout]:
        """A request has one prompt and a seed of its own: with one seed a server would give equal prompts equal
        answers."""
        return self.sample_until(None, prompts, n, spec, [spec.max_new_tokens] * len(prompts))

    def sample_until(
        self,
        outdated: Callable[[], bool] | None,
        prompts: Sequence[Sequence[int]],
        n: int,
        spec: SampleSpec,
        limits: Sequence[int],
    ) -> list[Rollout]:
        if spec.stop:
            raise SamplingError("sampler: stop strings end completions inside a token on a server; leave them out.")
        assert self._weights is not None, "push comes first"
        while len(self._loaded) > 1:
            self.server.unload(self._loaded[0])
            del self._loaded[0]
        ends = spec.ends(self._weights.policy)
        made = [
            _Part(prompts[i], i, first, min(MOST, n - first), replace(spec, max_new_tokens=limits[i]), ends)
            for i in range(len(prompts))
            for first in range(0, n, MOST)
        ]
        ended = threading.Event()
        try:
            with ThreadPoolExecutor(max(AT_ONCE, UNDER_WAY // n)) as pool:
                answers = [pool.submit(self._request, part, None if outdated is None else ended) for part in made]
                while wait(answers, None if outdated is None else LOOK).not_done:
                    if outdated is not None and outdated():
                        ended.set()  # a request that arrives after an interruption is ended by the next one
                        self.server.interrupt(self._model)
                found = [rollout for answer in answers for rollout in answer.result()]
                if self._whole is not None and (held := self.server.holds()) != self._whole:
                    raise SamplerLost(f"{self.place} has the weights {held!r} in place of {self._whole!r}.")
                return found
        except RequestRefused as error:
            if error.status != 404:
                raise
            raise SamplerLost(f"{self.place} no longer has {self._model}; was it started again?") from None

    def _request(self, part: _Part, ended: threading.Event | None) -> list[Rollout]:
        """The completions of one request. With ``ended`` they may have fewer tokens than their limit, and none where it
        is set."""
        if ended is not None and ended.is_set():
            return [self._rollout(Choice((), (), ABORTED, ""), part, k, True) for k in range(part.count)]
        own = replace(part.spec, seed=derive(part.spec.seed, f"sampler {part.place}", part.first))
        found = self.server.complete(self._model, part.prompt, part.count, own, part.ends)
        return [self._rollout(choice, part, k, ended is not None) for k, choice in enumerate(found)]

    def _rollout(self, found: Choice, part: _Part, k: int, partial: bool) -> Rollout:
        assert self._weights is not None
        stopped, limit = found.finish == "stop", part.spec.max_new_tokens
        tokens = found.tokens
        whole = bool(tokens) and stopped == (tokens[-1] in part.ends) and (stopped or len(tokens) == limit)
        if not whole and not (partial and found.finish == ABORTED and not part.ends.intersection(tokens)):
            raise SamplingError(
                f"sampler: {self.server.url} ended a completion of {len(tokens)} tokens with {found.finish!r}, which "
                f"is neither the policy's end of turn nor max_new_tokens={limit}; does it have another "
                "chat template, or a shorter context?"
            )
        finish: Literal["stop", "length"] = "stop" if stopped else "length"
        version, temperature = self._weights.version, part.spec.temperature or 1.0
        place = (part.place, part.first + k)
        return Rollout(*place, tuple(part.prompt), tokens, found.logprobs, finish, version, temperature)
