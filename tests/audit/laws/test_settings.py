"""Law KG: settings that do nothing, act in one mode or state only, or are declared inert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest_audit import Setting, Step, audit
from earnest_audit.law import Law
from earnest_audit.laws import (
    knobs,
)
from earnest_audit.verdict import Finding
from tests.audit.laws.test_divergences import both, jsd, step_of
from tests.audit.laws.test_pairs import pair_step
from tests.audit.steps import (
    dpo_step,
    sequence_logprobs,
    sft_loss,
    sft_step,
)

Data = Mapping[str, Any]


def outcome(step: Step, law: Law, subject: str) -> str | None:
    found = {f.subject: f.outcome for f in audit(step, laws=[law]).findings}
    return found.get(subject)


def _margins(model: nn.Module, batch: Data) -> Tensor:
    chosen, rejected = sequence_logprobs(model, batch)
    return (chosen - batch["ref_chosen"]) - (rejected - batch["ref_rejected"])


def _unreferred(loss: Any, dtype: torch.dtype = torch.float32, **more: Any) -> Step:
    step = dpo_step(loss, dtype=dtype)
    step.metrics = {}
    step.roles = {r: k for r, k in step.roles.items() if "reference" not in r}
    step.batch = {k: v for k, v in step.batch.items() if not k.startswith("ref")}
    for name, value in more.items():
        setattr(step, name, value)
    step.__post_init__()
    return step


def test_a_hinge_that_is_inactive_still_has_its_weight() -> None:
    """DPOP: λ·max(0, ref_c - lp_c) is 0 where every chosen answer is above its reference."""

    def loss(model: nn.Module, batch: Data, beta: float, lam: float, read: float = 1.0) -> Tensor:
        chosen, _ = sequence_logprobs(model, batch)
        below = (batch["ref_chosen"] - chosen).relu()
        return -F.logsigmoid(beta * (_margins(model, batch) - read * lam * below)).mean()

    for read, expected in ((1.0, "holds"), (0.0, "fails")):
        step = dpo_step(lambda m, b, beta, lam, read=read: loss(m, b, beta, lam, read))
        step.settings, step.metrics = {"beta": 0.1, "lam": 5.0}, {}
        step.batch = {**step.batch, "ref_chosen": step.batch["ref_chosen"] - 30}
        assert outcome(step, knobs.LAW, "setting lam") == expected


def test_a_hinge_whose_every_pair_is_active_still_has_its_margin() -> None:
    def loss(model: nn.Module, batch: Data, margin: float) -> Tensor:
        chosen, rejected = sequence_logprobs(model, batch)
        return (100 + margin - (chosen - rejected)).relu().mean()

    assert outcome(_unreferred(loss, settings={"margin": 1.0}), knobs.LAW, "setting margin") == "holds"
    ignored = _unreferred(lambda m, b, margin: loss(m, b, 1.0), settings={"margin": 1.0})
    assert outcome(ignored, knobs.LAW, "setting margin") == "fails"


@pytest.mark.parametrize("tau", [1e-3, 1e-12])
@pytest.mark.parametrize(("read", "expected"), [(1.0, "holds"), (0.0, "fails")])
def test_a_threshold_that_was_set_far_below(read: float, expected: str, tau: float) -> None:
    """A barrier's τ that was taken from another state: it is felt only when it is crossed."""

    def loss(model: nn.Module, batch: Data, tau: float) -> Tensor:
        value = sft_loss(model, batch)[0]
        return value + (10 * value - read * tau).relu()

    assert outcome(sft_step(loss, settings={"tau": tau}), knobs.LAW, "setting tau") == expected


@pytest.mark.parametrize(("read", "expected"), [(1.0, "holds"), (0.0, "fails")])
def test_a_threshold_that_lies_far_above(read: float, expected: str) -> None:
    """A bound of differences of probabilities (prime-rl's dppo_mask_high), where all probabilities are tiny."""

    def loss(model: nn.Module, batch: Data, high: float) -> Tensor:
        value = sft_loss(model, batch)[0]
        return torch.where(1e-5 * value.detach() > read * high, 0.0, 1.0) * value + (1 - read) * value

    assert outcome(sft_step(loss, settings={"high": 0.2}), knobs.LAW, "setting high") == expected


def rows(findings: tuple[Finding, ...]) -> dict[str, str]:
    return {f.subject: f.outcome for f in findings}


def mean(values: Tensor, batch: Mapping[str, Any]) -> Tensor:
    return (values * batch["mask"]).sum() / batch["mask"].sum()


def chunked(model: nn.Module, batch: Mapping[str, Any], chunk: int, means: bool) -> Tensor:
    logits = model(batch["ids"], batch["attention"])[:, :-1].flatten(0, 1)
    labels = batch["labels"][:, 1:].flatten()
    parts = zip(logits.split(chunk), labels.split(chunk), strict=True)
    sums = [(F.cross_entropy(x, y, ignore_index=-100, reduction="sum"), (y != -100).sum()) for x, y in parts]
    if means:  # NeMo-Automodel #3804: means of chunks are averaged
        return torch.stack([s / n for s, n in sums if n > 0]).mean()
    return torch.stack([s for s, _ in sums]).sum() / (labels != -100).sum()


@pytest.mark.parametrize("chunk", [16, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("means", [False, True])
def test_what_is_declared_inert_must_not_matter(means: bool, chunk: int, dtype: torch.dtype) -> None:
    def loss(model: nn.Module, batch: Mapping[str, Any], chunk: int) -> Tensor:
        return chunked(model, batch, chunk, means)

    step = sft_step(loss, settings={"chunk": Setting(chunk, "inert")}, dtype=dtype)
    assert rows(audit(step, laws=[knobs.LAW]).findings)["setting chunk"] == ("fails" if means else "holds")


def test_an_inert_setting_is_tried_at_its_legal_values() -> None:
    """A degree of parallelism that does not divide the vocabulary is no legal value; undeclared, it is tried."""

    def loss(model: nn.Module, batch: Mapping[str, Any], tp: int) -> Tensor:
        logits = model(batch["ids"], batch["attention"])
        full = logits.shape[-1] // tp * tp
        logits = torch.cat([logits[..., :full], 0.5 * logits[..., full:]], -1)  # the part that fills no shard is wrong
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)

    for modes, expected in (((23,), "holds"), ((22,), "fails"), ((), "fails")):  # the vocabulary has 23 ids
        step = sft_step(loss, settings={"tp": Setting(1, "inert", modes=modes)})
        assert outcome(step, knobs.LAW, "setting tp") == expected


def test_a_setting_of_another_mode_does_not_apply() -> None:
    def loss(model: nn.Module, batch: Mapping[str, Any], smooth: float, dead: float, how: str) -> Tensor:
        logits = model(batch["ids"], batch["attention"])[:, :-1].flatten(0, 1)
        share = smooth if how == "smooth" else 0.0
        return F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), ignore_index=-100, label_smoothing=share)

    step = sft_step(loss, settings={"smooth": 0.1, "dead": 0.1, "how": Setting("plain", modes=("smooth",))})
    found = rows(audit(step, laws=[knobs.LAW]).findings)
    assert found["setting smooth"] == "not applicable" and found["setting dead"] == "fails"


def test_a_clip_without_a_behaviour_policy_must_be_declared() -> None:
    def on_policy(model: nn.Module, batch: Mapping[str, Any], clip: float) -> Tensor:
        chosen, _ = sequence_logprobs(model, batch)
        return -(chosen - chosen.detach()).exp().clamp(1 - clip, 1 + clip).mean()

    step = pair_step(on_policy, settings={"clip": 0.2})
    assert rows(audit(step, laws=[knobs.LAW]).findings)["setting clip"] == "not declared"


def test_an_end_that_is_clamped_trains_nothing() -> None:
    """verl-recipe #151: β is held inside (1e-6, 1 - 1e-6), so that β = 1 has next to no gradient."""

    def clamped(model: nn.Module, batch: Mapping[str, Any], beta: float) -> Tensor:
        return jsd(model, batch, min(max(beta, 1e-6), 1 - 1e-6))

    def ends(model: nn.Module, batch: Mapping[str, Any], beta: float) -> Tensor:
        student, teacher = both(model, batch)
        if beta >= 1:
            return mean((student.exp() * (student - teacher)).sum(-1), batch)
        return jsd(model, batch, beta)

    for loss, seen in ((clamped, True), (ends, False)):
        found = rows(audit(step_of(loss, settings={"beta": 1.0}), laws=[knobs.LAW]).findings)
        assert (found.get("setting beta, its present value") == "fails") == seen and found["setting beta"] == "holds"


@pytest.mark.parametrize("heeded", [False, True])
def test_an_inert_option_may_be_a_text(heeded: bool) -> None:
    def loss(model: nn.Module, batch: Data, kernel: str) -> Tensor:
        return sft_loss(model, batch)[0] ** (2 if heeded and kernel == "eager" else 1)

    step = sft_step(loss, settings={"kernel": Setting("fused", "inert", modes=("eager",))})
    assert outcome(step, knobs.LAW, "setting kernel") == ("fails" if heeded else "holds")
