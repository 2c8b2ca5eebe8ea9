"""A teacher behind an OpenAI-compatible endpoint that gives the log-probs of a prompt: vLLM or `earnest serve`.

    POST /v1/completions   prompt=[ids], prompt_logprobs=K, max_tokens=1 (earnest: 0)
    choices[i].prompt_logprobs[t] = {id: {"logprob": log T(id | ids before t), "rank": …}, …}    t = 0: null

The server sends its own K most probable tokens and the token that stands there. The remaining mass is one bucket,
tail = log(1 - Σp); the metrics ``covered_mass_source`` and ``tail_error_bound`` give its size and its rounding error.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.engines.model_teacher import Reads, reads_of
from earnest.engines.vocabulary.known import tail_of
from earnest.errors import ConfigError, SignalError
from earnest.http import Client, NoAnswer, Refused
from earnest.models.protocol import PolicyLike
from earnest.objectives.base import Objective
from earnest.objectives.teacher_term import DEFAULT_TOP_K, TeacherTerm
from earnest.signals.batch import Batch
from earnest.signals.distributions import TopK
from earnest.signals.scorer import Scorer

AT_ONCE = 8
"""Requests under way together, one row each."""
PROBES = (
    "The 12 quick brown foxes (3.14) jump; don't they? Yes!",
    "def f(x):\n    return [x**2, 'é', \"ß\"]\t# 100%",
    "Größe, naïve, 東京, Привет, 🙂 1234567890",
)
"""Texts that both sides tokenize before the first step."""


@dataclass(frozen=True, eq=False)
class ServedTeacher:
    """The model ``model`` at ``url`` (None: the first that it lists), asked for its top ``top_k`` of every token.
    ``key`` names the environment variable with the API key. ``reads`` is as for ``ModelTeacher``."""

    kind: ClassVar[str] = "endpoint"

    url: str
    top_k: int
    model: str | None = None
    key: str = "EARNEST_TEACHER_KEY"
    reads: Reads = "student"
    timeout: float = 600.0

    @classmethod
    def connect(
        cls,
        student: PolicyLike,
        objective: Objective,
        url: str,
        *,
        reads: Reads | None = None,
        model: str | None = None,
        key: str | None = None,
    ) -> ServedTeacher:
        """The teacher of these terms, after a check of its tokenizer."""
        made = cls(url, endpoint_top_k(objective), model, key or cls.key, reads or reads_of(objective))
        made.check_tokenizer(student)
        return made

    def teach(self, engine: Scorer, informed: Batch, own: Batch) -> tuple[TopK, Float[Tensor, " M"]]:
        """The server's top K and its exact log-prob of the target, at every active token of ``informed``."""
        rows = [informed.whole_row(r) for r in range(len(informed))]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            scored = list(pool.map(self.scores, rows))
        vocabulary = engine.policy.head.weight.shape[0]
        ids, values, exact = [], [], []
        targets = informed.token_target.tolist()
        for (row, position), target in zip(informed.active.tolist(), targets, strict=True):
            top, own_value = self._entry(scored[row][position + 1], target, vocabulary)
            ids.append([token for token, _ in top])
            values.append([value for _, value in top])
            exact.append(own_value)
        device = informed.device
        logprobs = torch.tensor(values, dtype=torch.float64).clamp(max=0)
        whole = len(ids[0]) == vocabulary
        tail = torch.full((len(ids),), -math.inf).double() if whole else tail_of(logprobs)
        top_k = TopK(torch.tensor(ids, device=device), logprobs.float().to(device), tail.float().to(device))
        return top_k, torch.tensor(exact, device=device).clamp(max=0)

    def _entry(
        self, found: Mapping[str, Any] | None, target: int, vocabulary: int
    ) -> tuple[list[tuple[int, float]], float]:
        """(the K most probable tokens in falling order, the target's log-prob) of one place of the answer."""
        try:
            every = {int(token): float(entry["logprob"]) for token, entry in (found or {}).items()}
        except (TypeError, ValueError, KeyError):
            raise SignalError(f"teacher: {self.url} sent {str(found)[:120]} as the log-probs of a token.") from None
        wanted = min(self.top_k, vocabulary)
        if target not in every or len(every) < wanted or max(every) >= vocabulary:
            raise SignalError(
                f"teacher: {self.url} sent {len(every)} log-probs for a token, of ids up to {max(every, default=-1)}; "
                f"{wanted} of ids below {vocabulary} are needed, and that of the token itself ({target})."
            )
        ranked = sorted(every.items(), key=lambda entry: (-entry[1], entry[0]))[:wanted]
        return ranked, every[target]

    def scores(self, tokens: Sequence[int]) -> list[Mapping[str, Any] | None]:
        """The server's log-probs at each of these tokens; the first has none."""
        answer = self._complete({"prompt": list(tokens), "prompt_logprobs": self.top_k})
        found = answer["choices"][0].get("prompt_logprobs")
        if not isinstance(found, list) or len(found) != len(tokens):
            raise SignalError(
                f"teacher: {self.url} gives no prompt_logprobs for the {len(tokens)} tokens of a prompt; use vLLM or "
                "`earnest serve`."
            )
        return found

    def check_tokenizer(self, student: PolicyLike) -> None:
        """Raise unless the server tokenizes a few texts, and a rendered conversation, as the student does."""
        tokenizer = student.tokenizer
        texts = list(PROBES)
        if tokenizer.chat_template is not None:
            texts.append(tokenizer.decode(student.render([{"role": "user", "content": "1 + 1?"}])))
        for text in texts:
            ours = list(tokenizer(text)["input_ids"])
            if student.positions is not None and len(ours) + 2 > student.positions:
                continue
            answer = self._complete({"prompt": text, "return_token_ids": True})
            theirs = answer["choices"][0].get("prompt_token_ids") or (answer.get("prompt_token_ids") or [None])[0]
            if not isinstance(theirs, list):
                raise SignalError(
                    f"teacher: {self.url} gives no prompt_token_ids, so its tokenizer cannot be compared; use vLLM "
                    "0.10.2 or later, or `earnest serve`."
                )
            pairs = enumerate(zip_longest(ours, theirs), 1)
            place, (mine, other) = next((pair for pair in pairs if pair[1][0] != pair[1][1]), (0, (None, None)))
            if place:
                shown = "no token" if mine is None else f"{mine} ({tokenizer.decode([mine])!r})"
                raise ConfigError(
                    f"teacher: {self.url} has another tokenizer than {student.name}: token {place} of {text[:30]!r} is "
                    f"{shown} for the student and {'no token' if other is None else other} for the teacher, so its "
                    "probabilities are of other texts; take a teacher of the same family."
                )

    @cached_property
    def _http(self) -> Client:
        base = self.url.rstrip("/").removesuffix("/v1")
        return Client(base, os.environ.get(self.key, "").strip(), timeout=self.timeout)

    @cached_property
    def _served(self) -> tuple[str, bool]:
        """(the model's name, whether the server is earnest's)."""
        listed = self._call("GET", "/v1/models")
        models = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(models, list) or not models:
            raise SignalError(f"teacher: {self.url}/v1/models lists no model; does the key in ${self.key} allow any?")
        names = [str(m.get("id")) for m in models]
        if self.model is not None and self.model not in names:
            raise ConfigError(f"teacher.model: {self.url} has no {self.model!r}; it has {', '.join(names)}.")
        return self.model or names[0], models[0].get("owned_by") == "earnest"

    def _complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one prompt, with one choice."""
        name, ours = self._served
        # vLLM gives at least one token; earnest gives none, so that a row may fill the context.
        more = {"max_tokens": 0, "store": False} if ours and "prompt_logprobs" in body else {"max_tokens": 1}
        found = self._call("POST", "/v1/completions", {"model": name, "temperature": 1.0, **body, **more})
        choices = found.get("choices") if isinstance(found, dict) else None
        if not isinstance(choices, list) or len(choices) != 1:
            raise SignalError(f"teacher: {self.url} answered without a completion: {str(found)[:120]}")
        return dict(found)

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            return self._http.call(method, path, body).value
        except Refused as error:
            hint = f" Is ${self.key} set to a key of it?" if error.status in (401, 403) else ""
            if "logprobs" in error.text:
                hint = (
                    f" The terms ask for top_k {self.top_k}: lower it, or start vLLM with --max-logprobs {self.top_k}."
                )
            raise SignalError(f"teacher: {self.url}{path} refused with {error}{hint}") from None
        except NoAnswer as error:
            raise SignalError(
                f"teacher: {self.url}{path} failed {self._http.tries} times; the last time: {error}. Is it running?"
            ) from None


def endpoint_top_k(objective: Objective) -> int:
    """The largest K of the terms that read the teacher. An endpoint knows only its own top K."""
    sizes = []
    for weighted in objective.live():
        term = weighted.term
        if not isinstance(term, TeacherTerm):
            continue
        if term.support != "teacher":
            raise ConfigError(
                f"objective: {term.label} compares on support {term.support!r}, and an endpoint sends only its own "
                f"most probable tokens; set support: teacher and top_k: 20 on {term.label}."
            )
        sizes.append(term.top_k or DEFAULT_TOP_K)
    return max(sizes, default=DEFAULT_TOP_K)
