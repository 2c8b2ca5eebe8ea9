"""Signals of the batches during a run: masks, advantages, the sampler's log-probs, truncated answers. Shares are sums
over looks, so that a single unusual batch is not a finding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from earnest_audit.errors import nearest
from earnest_audit.law import not_declared
from earnest_audit.limits import ENOUGH
from earnest_audit.step import StepError
from earnest_audit.verdict import Finding, LawOutcome, judged

KNOWN = ("mask", "attention", "advantages", "group", "logprobs", "behaviour", "stale", "truncated", "ends")
GAP = 0.1  # mean |log ratio| of an unchanged policy; engines in 16 bits differ by 0.01 to 0.05


@dataclass
class Signals:
    """Counts over the looks at a run."""

    looks: dict[str, int] = field(default_factory=dict)
    supervised: int = 0
    tokens: int = 0
    flat_groups: int = 0
    groups: int = 0
    cut: int = 0
    answers: int = 0
    ended: int = 0
    endings: int = 0
    gap: float = 0.0  # the largest mean |log ratio| right after sampling
    all_supervised: bool = False  # prompts are meant to be supervised too

    def check_names(self, signals: dict[str, object]) -> None:
        for name in signals:
            if name not in KNOWN:
                raise StepError(f"unknown signal {name!r}: {nearest(name, KNOWN)}")

    def look(self, **signals: object) -> Iterator[Finding]:
        """Count one batch, and yield what has been wrong in all batches.

        ``mask``        1 where the loss is taken [B, T]
        ``attention``   1 on real tokens [B, T]
        ``advantages``  [B] or [B, T]
        ``group``       which prompt a row belongs to [B]
        ``logprobs``    the trainer's [B, T]
        ``behaviour``   the sampler's [B, T]
        ``stale``       updates since sampling, 0 by default
        ``truncated``   answers that hit the length limit [B]
        ``ends``        1 where the token that ends a supervised answer is supervised [N]
        """
        self.check_names(signals)
        given = {k: v for k, v in signals.items() if isinstance(v, Tensor)}
        mask = given.get("mask")
        if mask is not None:
            self._supervised(mask, given.get("attention"))
        if "advantages" in given:
            self._groups(given["advantages"], given.get("group"), mask)
        if "truncated" in given:
            self._count("truncated")
            self.cut += int((given["truncated"] != 0).sum())
            self.answers += given["truncated"].numel()
        if "ends" in given and given["ends"].numel():
            self._count("ends")
            self.ended += int((given["ends"] != 0).sum())
            self.endings += given["ends"].numel()
        if "logprobs" in given and "behaviour" in given and not signals.get("stale"):
            self._mismatch(given["logprobs"], given["behaviour"], mask)
        yield from (f for f in self.findings() if f.outcome == "fails")

    def _count(self, name: str) -> None:
        self.looks[name] = self.looks.get(name, 0) + 1

    def _supervised(self, mask: Tensor, attention: Tensor | None) -> None:
        self._count("mask" if attention is None else "attention")
        self.supervised += int((mask != 0).sum())
        self.tokens += mask.numel() if attention is None else int((attention != 0).sum())

    def _groups(self, advantages: Tensor, group: Tensor | None, mask: Tensor | None) -> None:
        """A group whose advantages are all 0 has a zero gradient."""
        self._count("advantages")
        a = advantages.detach()
        if a.ndim > 1:
            on = mask != 0 if mask is not None and mask.shape == a.shape else torch.ones_like(a, dtype=torch.bool)
            row = ((a != 0) & on).flatten(1).any(-1)
        else:
            row = a != 0
        _, index = torch.unique(group if group is not None else torch.arange(len(row)), return_inverse=True)
        live = torch.zeros(int(index.max()) + 1, dtype=torch.long, device=row.device)
        live.index_add_(0, index.to(row.device), row.long())
        self.groups += len(live)
        self.flat_groups += int((live == 0).sum())

    def _mismatch(self, logprobs: Tensor, behaviour: Tensor, mask: Tensor | None) -> None:
        self._count("behaviour")
        gap = (logprobs.detach().double() - behaviour.detach().double()).abs()
        on = mask != 0 if mask is not None and mask.shape == gap.shape else torch.ones_like(gap, dtype=torch.bool)
        if bool(on.any()):
            self.gap = max(self.gap, float(gap[on].mean()))

    def findings(self) -> Iterator[Finding]:
        """One row per signal, up to now."""
        yield self._share(
            "CV", "supervised share", self.supervised, self.tokens, max(map(self._seen, ("mask", "attention"))),
            "mask=…", full=bool(self._seen("attention")) and not self.all_supervised,
            meaning="Nothing is supervised, or everything is, the prompt included: the chat template marks no "
            "assistant span, or labels are all -100.",
        )  # fmt: skip
        yield self._share(
            "GL", "groups without a signal", self.flat_groups, self.groups, self._seen("advantages"), "advantages=…",
            full=True, empty=False,
            meaning="Every group's advantages are all 0: all answers to a prompt get the same reward, or a group is "
            "one answer. Nothing is learned.",
        )  # fmt: skip
        yield self._share(
            "CV", "answers cut at the limit", self.cut, self.answers, self._seen("truncated"), "truncated=…",
            full=True, empty=False,
            meaning="Every answer hits the length limit: none ever ends, and rewards see torn answers.",
        )  # fmt: skip
        if self._seen("ends"):
            yield self._share(
                "CV", "ends of answers, supervised", self.ended, self.endings, self._seen("ends"), "ends=…", full=False,
                meaning="No end token is ever supervised, though answers end with one: the model never learns to stop. "
                "Where the padding token is the end token, a collator that masks the one masks the other: give the "
                "tokenizer a padding token of its own, or mask by the attention mask.",
            )  # fmt: skip
        if not self._seen("behaviour"):
            yield not_declared("RT", "sampler = trainer", "logprobs=… and behaviour=…")
            return
        yield judged(
            "RT", "sampler = trainer", f"mean |log ratio| {self.gap:.2g} right after sampling", f"≤ {GAP:g}",
            self.gap <= GAP,
            "The policy that trains is not the one that sampled, before any update: a temperature or top-p is applied "
            "on one side only, weights did not arrive, or tokens are shifted by one.",
        )  # fmt: skip

    def _seen(self, name: str) -> int:
        return self.looks.get(name, 0)

    def _share(
        self, law: str, subject: str, part: int, whole: int, looks: int, what: str, *, full: bool, empty: bool = True,
        meaning: str,
    ) -> Finding:  # fmt: skip
        """Fails where the share has been 0 (``empty``) or 1 (``full``) all the time."""
        if not looks or not whole:
            return not_declared(law, subject, what)
        limits = [text for wrong, text in ((empty, "above 0 %"), (full, "below 100 %")) if wrong]
        measured, expected = f"{part / whole:.0%} in {looks} looks", ", ".join(limits)
        wrong = (empty and part == 0) or (full and part == whole)
        outcome: LawOutcome | bool = "not applicable" if wrong and looks < ENOUGH else not wrong
        return judged(law, subject, measured, expected, outcome, meaning)
