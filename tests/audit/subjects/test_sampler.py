"""Sampler: draws and log-probs are those of the trainer's distribution; each defect beside a right sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from earnest_audit import Sampler, SubjectError, audit

V, END, LONGEST = 23, 0, 6
TABLE = 1.5 * torch.randn(V, V, generator=torch.Generator().manual_seed(0))
"""The logits of the next token, by the last one."""


def score(prompt: int, ids: Sequence[int]) -> Tensor:
    return TABLE[[prompt, *ids[:-1]]]


def left(logits: Tensor, top_k: int, top_p: float, short: bool = False) -> Tensor:
    """What top-k and top-p leave; ``short``: without the token that crosses the mass."""
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    ordered, places = logits.sort(descending=True)
    mass = ordered.softmax(-1).cumsum(-1) - (0 if short else ordered.softmax(-1))
    out = torch.zeros(V, dtype=torch.bool).scatter(0, places, (mass >= top_p).index_fill(0, torch.tensor([0]), False))
    return logits.masked_fill(out, -torch.inf)


def sampler(fault: str = "", temperature: float = 0.7, top_p: float = 1.0, top_k: int = 0, **more: Any) -> Sampler:
    def one(last: int, rng: torch.Generator) -> tuple[list[int], list[float]]:
        ids, logprobs = [], []
        while len(ids) < LONGEST and (not ids or ids[-1] != END):
            raw = TABLE[last] + (0.5 * torch.randn(V) if fault == "noise" else 0)
            kept = left(raw / (1.0 if fault == "temperature" else temperature), top_k, top_p, fault == "short")
            last = int(kept.softmax(-1).multinomial(1, generator=rng))
            named = {"raw": raw, "not renormalised": raw / temperature}.get(fault, kept)
            ids.append(last)
            logprobs.append(float(named.log_softmax(-1)[last]))
        if fault == "off by one":
            logprobs = [0.0, *logprobs[:-1]]
        if fault == "stop lost" and ids[-1] == END and len(ids) > 1:
            return ids[:-1], logprobs[:-1]
        return (ids, logprobs) if fault != "no log-prob" else (ids, logprobs[1:])

    def draw(prompt: int, n: int, seed: int) -> list[tuple[list[int], list[float]]]:
        rng = torch.Generator().manual_seed(0 if fault == "seed" else seed)
        if fault == "unseeded":
            rng.seed()
        return [one(prompt, rng) for _ in range(n)] if fault != "copies" else n * [one(prompt, rng)]

    settings = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    return Sampler(draw, score, [3, 7], stop=(END,), max_tokens=LONGEST, **{**settings, **more})


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.3, "top_p": 0.8}, {"top_k": 5}, {"top_k": 9, "top_p": 0.9}])
def test_a_right_sampler_holds(settings: dict[str, Any]) -> None:
    verdict = audit(sampler(**settings))
    assert verdict.holds and {f.outcome for f in verdict.findings} == {"holds"}, verdict


@pytest.mark.parametrize(
    ("fault", "failed", "why"),
    [
        ("temperature", {"log-probs", "draws"}, "other settings"),
        ("raw", {"log-probs"}, "before temperature"),
        ("off by one", {"log-probs"}, "another place"),
        ("short", {"log-probs", "draws"}, "other settings"),
        ("not renormalised", {"log-probs"}, "renormalise"),
        ("stop lost", {"end tokens"}, "without the token that ended it"),
        ("copies", {"draws"}, "fresh draws"),
        ("seed", {"seeds"}, "seed"),
        ("unseeded", {"seeds"}, "seed"),
        ("noise", {"log-probs", "seeds"}, "other settings"),
        ("no log-prob", {"token ids"}, "one finite log-prob"),
    ],
)
def test_a_fault_of_a_sampler_is_seen(fault: str, failed: set[str], why: str) -> None:
    failures = audit(sampler(fault, top_p=0.8)).failures
    assert failed == {f.subject for f in failures} - ({"draws"} if fault == "noise" else set())
    assert why in failures[0].meaning


def test_an_undeclared_setting_is_seen() -> None:
    undeclared = sampler(top_p=0.8)
    undeclared.top_p = 1.0
    assert {"draws", "log-probs"} <= {f.subject for f in audit(undeclared).failures}


def test_settings_are_possible() -> None:
    with pytest.raises(SubjectError, match="top_p ≤ 1"):
        audit(sampler(top_p=1.5))


@pytest.mark.parametrize(("more", "lost"), [(8, "0 of 1040"), (-3, "6 of 1024")])
def test_a_sampler_may_fill_its_last_batch(more: int, lost: str) -> None:
    right = sampler()
    inner = right.draw
    right.draw = lambda prompt, n, seed: inner(prompt, n + more, seed)
    verdict = audit(right)
    assert verdict.findings[0].measured == f"{lost} answers" and verdict.holds is (more > 0), str(verdict)
