"""One audit of a server: its requests, and the same computed here."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.engines.local import LocalEngine
from earnest.errors import SamplingError
from earnest.models import SampleSpec
from earnest.models.sampling import truncate
from earnest.sync.base import Weights
from earnest.sync.behaviour import reason
from earnest.sync.probe import Logprobs, apart, tolerance
from earnest.sync.server import Choice, RequestRefused, Server
from earnest_audit.verdict import Finding

TEXTS = (
    "Sort these letters: d b a c",
    "What is 17 + 25?",
    "Name three colours.",
    "Repeat the word river four times.",
)
MOVED = 0.05
"""Nats per token that a pushed adapter moves the log-probs by at least."""


@dataclass(frozen=True)
class AuditedRequest:
    """What was requested: the weights (None: the base), the prompt and the settings."""

    weights: Weights | None
    prompt: tuple[int, ...]
    spec: SampleSpec
    min_p: float = 0.0


class SamplerAudit:
    """``server`` and ``engine`` run the same policy; ``temperature`` is the run's."""

    def __init__(self, server: Server, engine: LocalEngine, temperature: float) -> None:
        self.server, self.engine, self.policy, self.temperature = server, engine, engine.policy, temperature
        self.allowed = tolerance(engine.policy.dtype)
        self.subject = server.kind
        self.ends = engine.policy.eos_ids
        self.prompts = [tuple(engine.policy.render([{"role": "user", "content": text}])) for text in TEXTS]
        self._kept = engine.adapter.state_dict()
        self._run, self._count = secrets.token_hex(4), 0
        self._versions: dict[int, Weights] = {}
        self._names: dict[str, str] = {}  # of the weights that the server has, by their digest

    def describe(self) -> str:
        """The server with its version, where it has a route for it."""
        with suppress(SamplingError):
            found = self.server.call("GET", "/version")
            if isinstance(found, dict) and "version" in found:
                return f"{self.server.kind} {found['version']} at {self.server.url}"
        return f"{self.server.kind} at {self.server.url}"

    def spec(self, **settings: float | int) -> SampleSpec:
        made = SampleSpec(max_new_tokens=8, temperature=self.temperature, seed=11)
        return replace(made, **settings)  # type: ignore[arg-type]

    def ask(self, request: AuditedRequest, n: int = 1, model: str | None = None, **more: object) -> list[Choice]:
        """``n`` completions; ``model``: the name to request, by default the one that the weights were pushed under."""
        named = model or self.name_of(request.weights)
        more = more | ({"min_p": request.min_p} if request.min_p else {})
        return self.server.complete(named, request.prompt, n, request.spec, self.ends, **more)

    def name_of(self, weights: Weights | None) -> str:
        """What a request names to get these weights; they must be loaded."""
        return self.server.base if weights is None else self.server.model(self._names[weights.digest])

    def load(self, weights: Weights) -> str:
        """Push the weights under a name that was not used before, unless they are there; returns their name."""
        if weights.digest not in self._names:
            self._count += 1
            name = f"earnest-audit-{self._run}-{self._count}"
            self.server.load(name, weights)
            self._names[weights.digest] = name
        return self._names[weights.digest]

    def unload(self, weights: Weights) -> None:
        self.server.unload(self._names.pop(weights.digest))

    def close(self) -> None:
        """Unload what was pushed, where the server still answers, and restore the adapter."""
        for name in self._names.values():
            with suppress(SamplingError):
                self.server.unload(name)
        self.engine.adapter.load_state_dict(self._kept)

    def version(self, number: int) -> Weights:
        """Weights number 1, 2, …: the adapter with noise that moves the log-probs measurably from the base and from
        the other versions."""
        if number not in self._versions:
            adapter, rows = self.engine.adapter, list(self.prompts)
            before = [self.scores(w, rows) for w in (None, *self._versions.values())]
            for size in (0.02, 0.05, 0.1, 0.2, 0.4, 0.8):
                noise = torch.Generator().manual_seed(number)
                state = {
                    name: tensor.cpu() + (size * torch.randn(tensor.shape, generator=noise)).to(tensor.dtype)
                    for name, tensor in self._kept.items()
                }
                adapter.load_state_dict(state)
                self.engine.version = number
                made = Weights.of(self.engine)
                if all(apart(self.scores(made, rows), b) > MOVED for b in before):
                    break
            made.files(plain=self.server.kind != "earnest")  # while the adapter has these weights
            self._versions[number] = made
        return self._versions[number]

    @contextmanager
    def _as(self, weights: Weights | None) -> Iterator[None]:
        if weights is None:
            with self.engine.adapter.off():
                yield
            return
        self.engine.adapter.load_state_dict(weights.state)
        yield

    @torch.no_grad()
    def logits(self, weights: Weights | None, tokens: Sequence[int]) -> Float[Tensor, "T V"]:
        """Of the next token after every position."""
        with self._as(weights):
            ids = torch.tensor([list(tokens)], device=self.policy.device)
            return self.policy.head.logits(self.policy.hidden(ids)[0]).detach().cpu().double()

    def scores(self, weights: Weights | None, rows: Sequence[Sequence[int]]) -> Logprobs:
        """log π(token_t | token_<t) of fixed rows at temperature 1."""
        parts = [
            self.logits(weights, row[:-1]).log_softmax(-1).gather(-1, torch.tensor(list(row[1:]))[:, None])[:, 0]
            for row in rows
        ]
        return torch.cat(parts)

    def own(self, asked: Sequence[AuditedRequest], found: Sequence[Sequence[Choice]]) -> Logprobs:
        """The log-probs that the tokens of each request's completions have here, under what was requested."""
        parts = []
        for request, choice in ((r, c) for r, choices in zip(asked, found, strict=True) for c in choices):
            spec = request.spec
            logits = self.logits(request.weights, [*request.prompt, *choice.tokens[:-1]])[len(request.prompt) - 1 :]
            scaled = truncate(logits / (spec.temperature or 1.0), spec.top_k, spec.top_p)
            if request.min_p:
                least = scaled.max(-1, keepdim=True).values + math.log(request.min_p)
                scaled = scaled.masked_fill(scaled < least, -math.inf)
            parts.append(scaled.log_softmax(-1).gather(-1, torch.tensor(choice.tokens)[:, None])[:, 0])
        return torch.cat(parts)

    def finding(self, law: str, measured: str, expected: str, holds: bool, meaning: str = "") -> Finding:
        return Finding(law, self.subject, measured, expected, "holds" if holds else "fails", "" if holds else meaning)

    def refused(self, law: str, error: RequestRefused) -> Finding:
        """A setting that the server refuses is not applied in silence."""
        return Finding(law, self.subject, f"refused (HTTP {error.status})", "exact, or refused", "holds")

    def judged(
        self,
        law: str,
        asked: Sequence[AuditedRequest],
        found: Sequence[Sequence[Choice]],
        others: Mapping[str, Logprobs] | None = None,
        sentence: str = "",
    ) -> Finding:
        """Equal log-probs, or the reason why they differ: ``sentence``, or the one of what they match."""
        theirs, own = values(found), self.own(asked, found)
        off = apart(theirs, own)
        meaning = sentence or reason(theirs, own, others or {}, self.allowed)
        return self.finding(law, f"{off:.2g} nats per token off", f"≤ {self.allowed:g}", off <= self.allowed, meaning)


def values(found: Sequence[Sequence[Choice]]) -> Logprobs:
    """The log-probs of the completions of several requests, one after the other."""
    return torch.tensor([v for choices in found for c in choices for v in c.logprobs], dtype=torch.float64)
