"""Advantages and returns that are made of rewards and a critic's values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from earnest_audit.precision import rounding
from earnest_audit.subjects.base import Subject
from earnest_audit.verdict import Finding

MEANINGS = {
    "advantages": "γ or λ is missing or used twice, or a next value is another token's or from after the answer's end.",
    "returns": "They are not advantages + values: advantages were whitened first, or the carry is not weighed by γ·λ.",
}


@dataclass
class GAE(Subject, name="generalised advantages"):
    """GAE: Advantages are the sum of (γ·λ)ᵏ·δ over an answer's tokens, returns are advantages + values, masked tokens
    are not read, inputs are not modified.

    δₜ = rₜ + γ·V' - Vₜ      A = δₜ + γ·λ·A'      returns = A + V      V' and A': at the answer's next token, else 0

    Needs: ``fn(rewards, values, mask, gamma, lam)`` -> advantages or (advantages, returns), of three tensors [B, T] and
    two numbers. ``whitened`` where its advantages are normalised over the batch: it then has to give the returns too.
    ``holes`` where masked tokens may stand inside an answer (tool output) and are to be passed over.
    ``in_place=True``: it writes into its inputs by design.
    How: Random rewards and values on padded rows, for λ, 0 and 1; then rewards and values of masked tokens are changed.
    Exceptions: Masked tokens inside an answer are checked only with holes=True.
    Detects: γ that is missing in δ, TRL #5303 (bootstrap from padding), returns from whitened advantages
    """

    fn: Callable[[Tensor, Tensor, Tensor, float, float], Tensor | Sequence[Tensor | None]]
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
        rewards, values = (torch.randn(self.rows, self.length, generator=rng) * mask for _ in range(2))
        base = self._run(rewards, values, mask, self.lam)
        if (shape := base["advantages"].shape) != mask.shape:
            shapes = (str(tuple(shape)), str(tuple(mask.shape)))
            yield self.finding("shape", *shapes, False, "One advantage per token is expected.")
            return
        if self.whitened and "returns" not in base:
            why = "Return (advantages, returns): whitened advantages alone hide what is checked here."
            yield self.finding("GAE", "whitened advantages without returns", "-", "not declared", why)
            return
        if not self.in_place:
            inputs = {"rewards": rewards, "values": values, "mask": mask}
            why = "It writes into inputs, which the value loss or the next epoch read. (Or declare in_place=True.)"
            yield self.untouched(lambda r, v, m: self.fn(r, v, m, self.gamma, self.lam), inputs, why)[1]
        on, room = mask.bool(), rounding(rewards) * self.length * max(1.0, float(base["advantages"].abs().max()))
        for lam in (self.lam, 0.0, 1.0):
            wanted = _gae(rewards, values, mask, self.gamma, lam)
            for what, found in self._run(rewards, values, mask, lam).items():
                a, b = found[on].double(), (wanted if what == "advantages" else wanted + values)[on].double()
                if what == "advantages" and self.whitened:
                    a, b = (a - a.mean()) / a.std(), (b - b.mean()) / b.std()
                yield self.agrees(f"{what}, λ = {lam:g}", float((a - b).abs().max()), room, MEANINGS[what])
        hidden = 3 * (1 - mask)
        why = "Masked tokens reach the answer's: its last one bootstraps from padding, or a mean is over everything."
        for name, r, v in (("rewards", rewards + hidden, values), ("values", rewards, values - hidden)):
            for what, found in self._run(r, v, mask, self.lam).items():
                off = float((found - base[what])[on].abs().max())
                yield self.agrees(f"{name} where masked, in the {what}", off, room, why)

    def _mask(self) -> Tensor:
        """A prompt in front, padding after, rows of several lengths; a hole where holes are declared."""
        places = torch.arange(self.length)
        ends = self.length - torch.arange(self.rows) % max(self.length // 3, 1)
        mask = (places >= 2) & (places < ends[:, None])
        return (mask & (places != 4) if self.holes else mask).float()

    def _run(self, rewards: Tensor, values: Tensor, mask: Tensor, lam: float) -> dict[str, Tensor]:
        found = self.fn(rewards.clone(), values.clone(), mask.clone(), self.gamma, lam)
        given = found if isinstance(found, tuple | list) else (found,)
        named = zip(("advantages", "returns"), given, strict=False)
        return {name: t.detach().float() for name, t in named if t is not None}


def _gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """By the definition, masked tokens passed over."""
    out, ahead, carry = torch.zeros_like(rewards), torch.zeros(len(rewards)), torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        on = mask[:, t] != 0
        surprise = rewards[:, t] + gamma * ahead - values[:, t]
        carry = torch.where(on, surprise + gamma * lam * carry, carry)
        ahead = torch.where(on, values[:, t], ahead)
        out[:, t] = carry * on
    return out
