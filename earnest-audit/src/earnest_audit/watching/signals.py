"""Signals of the batches during a run: masks, advantages, the sampler's log-probs, truncated answers. Shares are sums
over looks, so that a single unusual batch is not a finding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from earnest_audit.errors import nearest
from earnest_audit.law import not_declared
from earnest_audit.limits import ENOUGH
from earnest_audit.step import StepError
from earnest_audit.verdict import Finding, LawOutcome, judged

KNOWN = ("mask", "attention", "advantages", "group", "logprobs", "behaviour", "stale", "truncated", "ends")
SAMPLED = 100_000  # rows that are remembered, to know those that come again
GAP = 0.1  # mean |log ratio| of an unchanged policy; engines in 16 bits differ by 0.01 to 0.05


@dataclass
class Share:
    """A share over all looks: it fails where it has been 0 (``empty``) or 1 (``full``) all the time."""

    law: str
    subject: str
    declare: str
    empty: bool
    full: bool
    meaning: str
    part: int = 0
    whole: int = 0
    looks: int = 0

    def add(self, on: Tensor, whole: int | None = None) -> None:
        self.part += int((on != 0).sum())
        self.whole += on.numel() if whole is None else whole
        self.looks += 1

    def finding(self) -> Finding:
        if not self.whole:
            return not_declared(self.law, self.subject, self.declare)
        limits = [text for wrong, text in ((self.empty, "above 0 %"), (self.full, "below 100 %")) if wrong]
        wrong = (self.empty and self.part == 0) or (self.full and self.part == self.whole)
        outcome: LawOutcome | bool = "not applicable" if wrong and self.looks < ENOUGH else not wrong
        measured = f"{self.part / self.whole:.0%} in {self.looks} looks"
        return judged(self.law, self.subject, measured, ", ".join(limits), outcome, self.meaning)


def _shares() -> dict[str, Share]:
    return {
        "mask": Share(
            "CV", "supervised share", "mask=…", True, False,
            "Nothing is supervised, or everything is, the prompt included: the chat template marks no assistant span, "
            "or labels are all -100.",
        ),
        "advantages": Share(
            "GL", "groups without a signal", "advantages=…", False, True,
            "Every group's advantages are all 0: all answers to a prompt get the same reward, or a group is one "
            "answer. Nothing is learned.",
        ),
        "truncated": Share(
            "CV", "answers cut at the limit", "truncated=…", False, True,
            "Every answer hits the length limit: none ever ends, and rewards are computed for truncated answers.",
        ),
        "ends": Share(
            "CV", "ends of answers, supervised", "ends=…", True, False,
            "No end token is ever supervised, though answers end with one: the model never learns to stop. Where the "
            "padding token is the end token, a collator that masks the one masks the other: give the tokenizer a "
            "padding token of its own, or mask by the attention mask.",
        ),
    }  # fmt: skip


@dataclass
class Signals:
    """Counts over the looks at a run."""

    shares: dict[str, Share] = field(default_factory=_shares)
    gap: float | None = None  # the largest mean |log ratio| right after sampling
    again: int = 0  # rows of the sampler that an earlier update was made from, so that the policy has moved since
    all_supervised: bool = False  # prompts are meant to be supervised too
    _first: dict[float, int] = field(default_factory=dict)  # of a row's sum: its first update

    def look(self, signals: Mapping[str, object], due: bool, updates: int) -> None:
        """Count one batch if it is due; ``Watch.step`` explains the signals."""
        for name in signals:
            if name not in KNOWN:
                raise StepError(f"unknown signal {name!r}: {nearest(name, KNOWN)}")
        given = {k: v for k, v in signals.items() if isinstance(v, Tensor)}
        fresh = self._fresh(given["behaviour"], updates) if "behaviour" in given else None
        if not due:
            return
        mask, shown = given.get("mask"), given.get("attention")
        if mask is not None:
            self.shares["mask"].add(mask, None if shown is None else int((shown != 0).sum()))
            self.shares["mask"].full |= shown is not None and not self.all_supervised
        if "advantages" in given:
            self.shares["advantages"].add(_flat_groups(given["advantages"], given.get("group"), mask))
        for name in ("truncated", "ends"):
            if name in given and given[name].numel():
                self.shares[name].add(given[name])
        if "logprobs" in given and "behaviour" in given and not signals.get("stale"):
            gap = (given["logprobs"].detach().double() - given["behaviour"].detach().double()).abs()
            assert fresh is not None
            self.again += int((~fresh).sum())
            on = _on(mask, gap) & fresh.to(gap.device)[(...,) + (None,) * (gap.ndim - 1)]
            self.gap = max(self.gap or 0.0, float(gap[on].mean()) if bool(on.any()) else 0.0)

    def _fresh(self, behaviour: Tensor, updates: int) -> Tensor:
        """Rows that no earlier update was made from [B]; of tokens in a row, one for all."""
        rows = behaviour.detach().double().reshape(len(behaviour) if behaviour.ndim > 1 else 1, -1)
        fresh = torch.tensor([self._first.setdefault(total, updates) == updates for total in rows.sum(-1).tolist()])
        while len(self._first) > SAMPLED:
            del self._first[next(iter(self._first))]
        return fresh

    def findings(self) -> Iterator[Finding]:
        """One row per signal, up to now."""
        yield from (share.finding() for name, share in self.shares.items() if share.looks or name != "ends")
        if self.gap is None:
            yield not_declared("RT", "sampler = trainer", "logprobs=… and behaviour=…")
            return
        again = f", without {self.again} rows that came again" if self.again else ""
        yield judged(
            "RT", "sampler = trainer", f"mean |log ratio| {self.gap:.2g} right after sampling{again}", f"≤ {GAP:g}",
            self.gap <= GAP,
            "The policy that trains is not the one that sampled, before any update: a temperature or top-p is applied "
            "on one side only, weights did not arrive, or tokens are shifted by one. Where updates were made since "
            "sampling, w.step(…, stale=number of them) declares it.",
        )  # fmt: skip


def _on(mask: Tensor | None, like: Tensor) -> Tensor:
    """Where the loss is taken; everywhere where no mask of this shape is given."""
    return mask != 0 if mask is not None and mask.shape == like.shape else torch.ones_like(like, dtype=torch.bool)


def _flat_groups(advantages: Tensor, group: Tensor | None, mask: Tensor | None) -> Tensor:
    """Per group whether all its advantages are 0: it has a zero gradient."""
    a = advantages.detach()
    row = ((a != 0) & _on(mask, a)).flatten(1).any(-1) if a.ndim > 1 else a != 0
    _, index = torch.unique(group if group is not None else torch.arange(len(row)), return_inverse=True)
    live = torch.zeros(int(index.max()) + 1, dtype=torch.long, device=row.device)
    return live.index_add_(0, index.to(row.device), row.long()) == 0
