"""What is sampled: answers, and the log-probs that are reported with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from earnest_audit.precision import rounding
from earnest_audit.subjects.base import Subject, difference
from earnest_audit.verdict import Finding

WRONG = 1e-6  # the probability with which a right sampler may fail what counts draws
FEW = 16  # of a prompt: tokens that are counted, and answers whose log-probs are compared, or that are drawn again


@dataclass
class Sampler(Subject, name="sampler"):
    """RT-SAMPLER: A sampler draws from the trainer's distribution at the declared temperature, top-p and top-k, and
    reports the log-probs of that distribution; seeds repeat, and answers end at a stop token.

    log-probs   those of the distribution that was sampled, softmax(z / T), renormalised over what top-k and top-p leave
    draws       the first token is drawn as often as that distribution has it
    seeds       the same seed gives the same tokens, another seed others
    end tokens  an answer ends with its first stop token, or at max_tokens, and includes that token

    Needs: ``draw(prompt, n, seed)`` -> n pairs (ids, log-probs) of answers; ``score(prompt, ids)`` -> the trainer's
    logits, or log-probs at temperature 1, of all tokens in the place of each of the ids [T, V]. ``stop``: ids that end
    an answer, which has at most ``max_tokens`` tokens.
    How: The most probable first tokens of ``draws`` answers are counted, each and together; by Chernoff's bound a right
    sampler fails in one audit of a million. Top-p comes after top-k. An ignored temperature shows where it is not 1.
    Exceptions: Two programs in 16 bits differ legitimately: declare precision.
    Detects: log-probs before temperature, of another token, or not renormalised; copied draws; a lost stop token
    """

    draw: Callable[[Any, int, int], Sequence[tuple[Sequence[int], Sequence[float]]]]
    score: Callable[[Any, Sequence[int]], Tensor]
    prompts: Sequence[Any]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: Sequence[int] = ()
    max_tokens: int | None = None
    precision: torch.dtype | None = None
    draws: int = 512

    def check(self) -> Iterator[Finding]:
        if not (self.temperature > 0 and 0 < self.top_p <= 1):
            raise self.error(f"temperature={self.temperature}, top_p={self.top_p}", "above 0 is needed, and top_p ≤ 1")
        answers = [(p, self._drawn(p, self.draws, 0)) for p in self.prompts]
        each = [ids for _, of in answers for ids, _ in of]
        asked = len(each) + sum(max(0, self.draws - len(of)) for _, of in answers)  # or more: a full last batch
        lost = asked - sum(0 < len(ids) == sum(map(math.isfinite, given)) for _, of in answers for ids, given in of)
        why = "Answers are empty or missing, or not every token has one finite log-prob."
        yield self.finding("token ids", f"{lost} of {asked} answers", "none", not lost, why)
        if lost:
            return
        self._limit = rounding(self.score(self.prompts[0], each[0]), precision=self.precision)
        offs = [self._off(self.score(p, a[0]), *a) for p, of in answers for a in of[:FEW]]
        off, raw = (max(column) for column in zip(*offs, strict=True))
        why = "They are not the trainer's: another place, other settings, or not renormalised over what is left."
        why = why if raw > self._limit else "They are those before temperature, top-p and top-k."
        yield self.agrees("log-probs", off, self._limit, why)
        yield from self._first([(p, [ids[0] for ids, _ in of]) for p, of in answers])
        if not self.stop or self.max_tokens is None:
            yield self.not_declared("end tokens", "stop=(…) and max_tokens=…")
            return
        ends = [[n for n, t in enumerate(ids, 1) if t in self.stop or n == self.max_tokens] for ids in each]
        wrong = [str(ids[-5:]) for ids, end in zip(each, ends, strict=True) if end[:1] != [len(ids)]]
        more = ": goes on after a stop token, or ends without the token that ended it, so that the end is not trained."
        yield self.none("end tokens", wrong, f"{len(wrong)} of {len(each)} answers end elsewhere", more)

    def _drawn(self, prompt: Any, n: int, seed: int) -> list[tuple[list[int], list[float]]]:
        return [([int(t) for t in ids], [float(v) for v in given]) for ids, given in self.draw(prompt, n, seed)]

    def _off(self, logits: Tensor, ids: list[int], reported: list[float]) -> tuple[float, float]:
        """How far reported log-probs are from those of the declared distribution, and from those before settings."""
        at, found = torch.tensor(ids)[:, None], torch.tensor(reported).double()
        ways = torch.stack([z.gather(-1, at)[:, 0] for z in self._declared(logits)])
        own = ways.gather(0, (ways - found).abs().nan_to_num(0.0).argmin(0)[None])[0]
        return difference(found, own), difference(found, logits.detach().cpu().log_softmax(-1).gather(-1, at)[:, 0])

    def _declared(self, logits: Tensor) -> list[Tensor]:
        """Log-probs at the declared settings; what top-p leaves by its last token may be a matter of rounding."""
        z = logits.detach().cpu().double() / self.temperature
        if 0 < self.top_k < z.shape[-1]:
            z = z.masked_fill(z < z.topk(self.top_k).values[..., -1:], -math.inf)
        p, places = z.softmax(-1).sort(dim=-1, descending=True, stable=True)
        ends = [max(WRONG, self.top_p + self._limit * by) for by in (0, -1, 1)] if self.top_p < 1 else [math.inf]
        outside = [(p.cumsum(-1) - p >= end).scatter(-1, places, p.cumsum(-1) - p >= end) for end in ends]
        return [z.masked_fill(out, -math.inf).log_softmax(-1) for out in outside]

    def _first(self, drawn: Sequence[tuple[Any, list[int]]]) -> Iterator[Finding]:
        """The first tokens of the answers to each prompt."""
        ways = [[z.exp()[0] for z in self._declared(self.score(p, ids[:1]))] for p, ids in drawn]
        off = [min(self._surprise(p, ids) for p in of) for of, (_, ids) in zip(ways, drawn, strict=True)]
        limit = math.log(2 * len(drawn) * (2 * FEW + 1) / WRONG)
        why = "Tokens are not drawn as often as declared: another temperature, top-p or top-k, or no fresh draws."
        yield self.agrees("draws", max(off), limit, why, "a surprise of {} nats")
        seeds = [[[ids for ids, _ in self._drawn(p, FEW, seed)] for p in self.prompts] for seed in (3, 3, 4)]
        chance = math.prod(float((of[0] ** 2).sum()) ** FEW for of in ways)  # that two seeds have the same first tokens
        same, other = (["other", "the same"][seeds[0] == of] for of in seeds[1:])
        holds = same == "the same" and (other == "other" or chance > WRONG)
        why = "Answers do not depend on the seed alone: a run cannot be repeated, or every step draws the same."
        yield self.finding("seeds", f"same seed: {same} tokens; other seed: {other}", "the same, other", holds, why)

    def _surprise(self, p: Tensor, drawn: list[int]) -> float:
        """The largest n·KL(counted ‖ p), up to rounding: of the most probable tokens, each and together, and of all."""
        order = p.argsort(descending=True)
        counts, mass = torch.tensor(drawn).bincount(minlength=len(p))[order].double(), p[order]
        q = torch.cat([counts[:FEW], counts[:FEW].cumsum(0), counts[mass > 0].sum()[None]]) / len(drawn)
        p = torch.cat([mass[:FEW], mass[:FEW].cumsum(0), torch.ones(1)]).clamp(max=1.0)
        near = q.minimum(p + self._limit * p * (1 - p)).maximum(p - self._limit * p * (1 - p))
        parts = [torch.xlogy(a, a) - torch.xlogy(a, b) for a, b in ((q, near), (1 - q, 1 - near))]
        return len(drawn) * float((parts[0] + parts[1]).max())
