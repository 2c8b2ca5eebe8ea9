"""Advantages and returns that are made of rewards and a critic's values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from earnest_audit.precision import rounding
from earnest_audit.subjects.base import Subject
from earnest_audit.verdict import Finding


@dataclass
class GAE(Subject, name="GAE"):
    """GAE: Values equal to the actual returns give zero advantages, λ = 1 gives returns that do not depend on the
    values, λ = 0 looks one step ahead, masked tokens are not read, returns are advantages + values, inputs are not
    modified.

    V = the trajectory's own discounted return   A = 0 at every token and for every λ
    λ = 1                                        A + V (the returns) does not depend on V
    λ = 0                                        a token's A does not depend on later rewards
    V = 0                                        γ and λ come as their product only
    masked positions                             are not read
    returns                                      = A + V, with A before any whitening
    inputs                                       are not written into

    Needs: ``fn`` takes rewards, values and mask [B, T] and two numbers. ``whitened`` where its advantages are
    normalised over the batch: then it has to give the returns too, which are not. ``holes`` where masked tokens may
    stand inside an answer (tool output) and are to be passed over. ``in_place=True``: it writes into its inputs by
    design.
    How: Values, λ and masked entries are changed on ragged rows with a prompt and padding.
    Exceptions: Whitened advantages declare whitened=True and are judged by their returns. Masked tokens inside an
    answer are checked only with holes=True.
    Detects: γ that is missing in the temporal difference, TRL #5303 (bootstrap from padding), returns from whitened
    advantages
    """

    fn: Callable[..., Any]
    gamma: float = 0.9
    lam: float = 0.7
    whitened: bool = False
    holes: bool = False
    rows: int = 4
    length: int = 9
    seed: int = 0
    in_place: bool = False

    def check(self) -> Iterator[Finding]:
        rng = torch.Generator().manual_seed(self.seed)
        mask = self._mask()
        rewards, values, other = (torch.randn(self.rows, self.length, generator=rng) * mask for _ in range(3))
        base, returns = self._run(rewards, values, mask)
        if base.shape != mask.shape:
            shapes = (str(tuple(base.shape)), str(tuple(mask.shape)))
            yield self.finding("shape", *shapes, False, "One advantage per token is expected.")
            return
        if self.whitened and returns is None:
            why = "Return (advantages, returns): whitened advantages alone hide what is checked here."
            yield self.finding("GAE", "whitened advantages without returns", "-", "not declared", why)
            return
        if not self.in_place:
            inputs = {"rewards": rewards, "values": values, "mask": mask}
            why = "GAE writes into its inputs, which the value loss, the log or the next epoch read afterwards."
            yield self.untouched(lambda *handed: self.fn(*handed, self.gamma, self.lam), inputs, why)[1]
        room = rounding(rewards) * self.length * max(1.0, float(base.abs().max()))
        for subject, a, b, on, meaning in self._relations(rewards, (values, other), mask, (base, returns)):
            yield self.agrees(subject, float((a - b)[on.bool()].abs().max()), room, meaning)
        if returns is not None:
            a, b = (t[mask.bool()].double() for t in (base, returns - values))
            if self.whitened:  # the others but for a shift and a factor
                a, b = (a - a.mean()) / a.std(), (b - b.mean()) / b.std()
            why = "The critic is trained towards something else than what its advantages came from."
            yield self.agrees("returns = advantages + values", float((a - b).abs().max()), room, why)

    def _relations(
        self, rewards: Tensor, values: tuple[Tensor, Tensor], mask: Tensor, base: tuple[Tensor, Tensor | None]
    ) -> Iterator[tuple[str, Tensor, Tensor, Tensor, str]]:
        """Subject, two computations that agree, where, and what a failure means."""
        known, last, zero = _discounted(rewards, mask, self.gamma), _last(mask), torch.zeros_like(rewards)
        for lam in (self.lam, 0.0, 1.0):
            found, returns = self._run(rewards, known, mask, lam=lam)
            yield (
                f"values = what really came, λ = {lam:g}",
                found if not self.whitened or returns is None else (returns - known) * mask, zero, mask,
                "A critic that knows the future leaves nothing to learn, and still there are advantages: γ is missing "
                "in the temporal difference, the next value is another token's, or the last token bootstraps from "
                "what comes after the answer.",
            )  # fmt: skip
        totals = [found + v if returns is None else returns for v in values
                  for found, returns in [self._run(rewards, v, mask, lam=1.0)]]  # fmt: skip
        yield (
            "λ = 1: returns do not depend on the values", totals[0], totals[1], mask,
            "With λ = 1 a return is the sum of the rewards, and here the critic's values are in it: the carry is "
            "weighed by something else than γ·λ, or advantages were whitened before the returns were made.",
        )  # fmt: skip
        if not self.whitened:
            paid = rewards + 2.0 * last.to(rewards)  # at the answers' last tokens: with λ = 0 it reaches none before
            later, sooner = (self._run(r, values[0], mask, lam=0.0)[0] for r in (paid, rewards))
            yield (
                "λ = 0: no later reward", later, sooner, mask * ~last,
                "With λ = 0 a token's advantage contains its own reward and the next value, and nothing else: λ does "
                "not weigh the carry.",
            )  # fmt: skip
            one, two = (self._run(rewards, zero, mask, gamma=g, lam=k)[0] for g, k in ((0.9, 0.5), (0.5, 0.9)))
            yield (
                "values 0: γ·λ is one number", one, two, mask,
                "Without values, γ = 0.9 and λ = 0.5 must give what γ = 0.5 and λ = 0.9 give: one of the two is not "
                "used, or is used twice.",
            )  # fmt: skip
        hidden = 3 * (1 - mask)
        for name, r, v in (("rewards", rewards + hidden, values[0]), ("values", rewards, values[0] - hidden)):
            for what, mine, theirs in zip(("advantages", "returns"), self._run(r, v, mask), base, strict=True):
                if mine is not None and theirs is not None:
                    yield (
                        f"{name} where masked, in the {what}", mine, theirs, mask,
                        f"{name.capitalize()} of masked tokens (prompt, padding) reach the {what} of the answer's: the "
                        "last token bootstraps from padding, or a mean is taken over everything.",
                    )  # fmt: skip

    def _mask(self) -> Tensor:
        """A prompt in front, padding after, rows of several lengths; a hole where holes are declared."""
        places = torch.arange(self.length)
        ends = self.length - torch.arange(self.rows) % max(self.length // 3, 1)
        mask = (places >= 2)[None] & (places[None] < ends[:, None])
        if self.holes:
            mask &= (places != 4)[None]
        return mask.float()

    def _run(
        self, rewards: Tensor, values: Tensor, mask: Tensor, gamma: float | None = None, lam: float | None = None
    ) -> tuple[Tensor, Tensor | None]:
        g, k = self.gamma if gamma is None else gamma, self.lam if lam is None else lam
        found = self.fn(rewards.clone(), values.clone(), mask.clone(), g, k)
        advantages, returns = found if isinstance(found, tuple | list) else (found, None)
        return advantages.detach().float(), None if returns is None else returns.detach().float()


def _discounted(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """What really came from each token on, masked tokens passed over."""
    out, carry = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        carry = torch.where(mask[:, t] != 0, rewards[:, t] + gamma * carry, carry)
        out[:, t] = carry * mask[:, t]
    return out


def _last(mask: Tensor) -> Tensor:
    places = torch.arange(mask.shape[1]) * (mask != 0)
    return places == places.amax(-1, keepdim=True)
