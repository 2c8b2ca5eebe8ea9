"""The audit on correct steps: no alarm, everything restored, clear sentences for wrong declarations, a bounded cost."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from earnest_audit import LawBroken, Metric, Setting, Step, StepError, Verdict, audit
from earnest_audit.errors import EarnestError
from earnest_audit.laws import clipping, coverage, documents, inputs, likelihood, masks, on_policy, shadow
from earnest_audit.verdict import Finding
from tests.audit.steps import STEPS, Tiny, grpo_loss, most, policy_step, sft_loss, sft_step

DTYPES = (torch.float32, torch.bfloat16)


FAMILIES = list(STEPS)


def names(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_correct_step_raises_nothing(family: str, dtype: torch.dtype, seed: int) -> None:
    verdict = audit(STEPS[family](dtype=dtype, seed=seed))
    assert verdict.holds and not verdict.failures, str(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 20))
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_false_alarm_over_seeds(family: str, dtype: torch.dtype, seed: int) -> None:
    verdict = audit(STEPS[family](dtype=dtype, seed=seed))
    assert verdict.holds and not verdict.failures, str(verdict)


class Noisy(Tiny):
    """With dropout, a running statistic and a frozen part: everything that a probe can leave in another state."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.drop = nn.Dropout(0.1)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor, attention: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        self.calls += 1
        return self.drop(super().forward(ids, attention, documents))


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What must be bit-equal afterwards."""
    return copy.deepcopy(
        {
            "parameters": {n: p.detach() for n, p in model.named_parameters()},
            "buffers": dict(model.named_buffers()),
            "gradients": {n: p.grad for n, p in model.named_parameters()},
            "flags": {n: p.requires_grad for n, p in model.named_parameters()},
            "modes": {n: m.training for n, m in model.named_modules()},
            "hooks": {n: len(m._forward_hooks) + len(m._backward_hooks) for n, m in model.named_modules()},
            "optimizer": optimizer.state_dict(),
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state()[1],  # noqa: NPY002
            "python": random.getstate(),
        }
    )


def assert_bit_equal(a: Any, b: Any, place: str = "") -> None:
    if isinstance(a, Tensor):
        assert isinstance(b, Tensor) and a.dtype == b.dtype, place
        assert a.contiguous().reshape(-1).view(torch.uint8).equal(b.contiguous().reshape(-1).view(torch.uint8)), place
    elif isinstance(a, np.ndarray):
        assert np.array_equal(a, b), place
    elif isinstance(a, Mapping):
        assert list(a) == list(b), place
        for key in a:
            assert_bit_equal(a[key], b[key], f"{place}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), place
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_bit_equal(x, y, f"{place}[{i}]")
    else:
        assert a == b, f"{place}: {a} became {b}"


def used(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> None:
    """Two real steps, so that the optimizer has moments, and a third gradient that is left lying there."""
    for _ in range(2):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    optimizer.zero_grad()
    loss().backward()


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("foreign", [torch.optim.AdamW, torch.optim.SGD], ids=["adamw", "sgd"])
def test_everything_is_restored(dtype: torch.dtype, foreign: Callable[..., torch.optim.Optimizer]) -> None:
    step = sft_step(dtype=dtype)
    model = Noisy().to(dtype)
    optimizer = foreign([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    used(model, optimizer, lambda: sft_loss(model, step.batch)[0])
    model.drop.eval()  # a mixed state of modes
    mine = {k: v.clone() for k, v in step.batch.items()}
    before = everything(model, optimizer)
    grads = {n: p.grad for n, p in model.named_parameters()}
    audit(Step(model=model, loss=sft_loss, batch=mine, roles=step.roles, optimizer=optimizer, max_grad_norm=1.0))
    assert_bit_equal(before, everything(model, optimizer))
    assert all(p.grad is grads[n] for n, p in model.named_parameters()), "a gradient is another tensor"
    assert_bit_equal(mine, dict(step.batch))


@pytest.mark.parametrize("bound", [1, 10])
@pytest.mark.may_not_be_checked
def test_everything_is_restored_when_the_loss_raises(bound: int) -> None:
    """What the step raises as it is goes through; what it raises later, on a changed batch, is a row of that law."""
    step = sft_step()
    assert step.optimizer is not None
    calls = 0

    def fails_later(model: nn.Module, batch: Mapping[str, Any]) -> Any:
        nonlocal calls
        calls += 1
        if calls >= bound:
            raise KeyError("the last call")
        return sft_loss(model, batch)

    used(step.model, step.optimizer, lambda: sft_loss(step.model, step.batch)[0])
    before = everything(step.model, step.optimizer)
    bad = Step(model=step.model, loss=fails_later, batch=step.batch, roles=step.roles, optimizer=step.optimizer)
    if bound == 1:
        with pytest.raises(KeyError, match="the last call"):
            audit(bad)
        assert calls == 1
    else:
        verdict = audit(bad)
        assert any(f.measured == "could not be checked (KeyError: 'the last call')" for f in verdict.errors)
        assert any(f.law == "GL" and f.outcome == "holds" for f in verdict.findings), "the rows up to there are kept"
    assert_bit_equal(before, everything(step.model, step.optimizer))


def test_an_interrupt_ends_the_audit() -> None:
    calls = 0

    def interrupted(model: nn.Module, batch: Mapping[str, Any]) -> Any:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise KeyboardInterrupt
        return sft_loss(model, batch)

    with pytest.raises(KeyboardInterrupt):
        audit(sft_step(interrupted))


def schedule() -> Any:
    return torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([nn.Parameter(torch.ones(1))]), lambda _: 1.0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"roles": {"maks": "labels"}}, r"unknown role 'maks' .*: did you mean 'mask'\?"),
        ({"roles": {"labels": "label"}}, r"role 'labels' names 'label', which the batch does not have: .*'labels'"),
        ({"roles": {"labels": "name"}}, r"role 'labels' \('name'\) must be a tensor, got str"),
        (
            {"metrics": {"kl": Metric(weight="betta")}, "settings": {"beta": 0.1}},
            r"weighed by 'betta', which is no setting: .*'beta'",
        ),
        (
            {"settings": {"mode": Setting("a", modes=("a",))}},
            r"option 'mode' needs at least two different modes, got \['a', 'a'\]",
        ),
        ({"family": "pretraining"}, r"unknown family 'pretraining'"),
        ({"batch": {}, "roles": {}}, r"the batch is empty"),
        ({"batch": (torch.ones(2),), "roles": {}}, r"the batch is a tuple: give a dict of tensors"),
        ({"batch": torch.ones(2), "roles": {}}, r"the batch is a Tensor: give a dict of tensors"),
        ({"settings": {"beta": 0.1}}, r"cannot be called as loss\(model, batch, beta=…\): .* unexpected .* 'beta'"),
        ({"loss": grpo_loss, "settings": {"clip": 0.1}}, r"missing a required argument: 'beta'; settings="),
        ({"loss": lambda batch: batch}, r"loss\(batch\) cannot be called as loss\(model, batch\): too many"),
        ({"loss": lambda batch, model: sft_loss(model, batch)}, r"loss\(batch, model\) is called .*: exchange"),
        ({"loss": 3}, r"loss is of type int: give a function"),
        ({"roles": ["labels"]}, r"roles is of type list: give a dict, roles=\{name: …\}"),
        ({"optimizer": schedule()}, r"optimizer is a LambdaLR, which has no param_groups"),
        ({"max_grad_norm": "1.0"}, r"max_grad_norm='1.0' is of type str: give a number, or None"),
        ({"metrics": {"kl": Metric(low=1, high=0)}}, r"metric 'kl' has low=1 above high=0"),
        ({"roles": {"chosen": "ids", "rejected": "ids"}}, r"'chosen' and 'rejected' both name 'ids'"),
        ({"paths": {"a": 3}}, r"paths\['a'\] is of type int: give a function"),
        ({"reference": torch.ones(2)}, r"reference is of type Tensor: give a function, .* reference\(\)"),
        ({"reference": lambda: None}, r"reference gives a NoneType: give a tensor"),
        ({"logprobs": lambda model, batch: 1}, r"logprobs gives a int: give a tensor"),
    ],
)
def test_a_wrong_declaration_gives_one_sentence(change: dict[str, Any], sentence: str) -> None:
    step = sft_step()
    right: dict[str, Any] = {"batch": {**step.batch, "name": "x"}, "roles": step.roles}
    with pytest.raises(StepError, match=sentence) as error:
        audit(Step(**{"model": step.model, "loss": sft_loss, **right, **change}))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("wrong", ["logprobs", "student", "pair"])
def test_what_a_declared_function_gives_is_compared_once(wrong: str) -> None:
    """A column too many made eleven laws raise, and the verdict held."""
    make = {"logprobs": policy_step, "student": STEPS["divergence"], "pair": STEPS["preference"]}[wrong]
    right, name = make(), "student" if wrong == "student" else "logprobs"
    own: Any = getattr(right, name)
    sentence = {"logprobs": r"logprobs gives a tensor of shape \(5, 12\), but role 'behaviour' \('old'\) has \(5, 11\)",
                "student": r"student gives .*\(5, 12, 23\), but role 'teacher' \('teacher'\) has \(5, 11, 23\)",
                "pair": r"logprobs gives a tensor of shape \(5,\): give two tensors of shape \(5,\)"}  # fmt: skip

    def other(model: nn.Module, batch: Mapping[str, Any]) -> Any:
        found = own(model, batch)
        return found[0] if wrong == "pair" else torch.cat([found, found[:, :1]], 1)

    with pytest.raises(StepError, match=sentence[wrong]):
        audit(replace(right, **{name: other}), laws=[])
    assert not audit(right, laws=[]).failures


def test_a_loss_of_pairs_of_another_family_gives_two_answers() -> None:
    assert not audit(replace(STEPS["preference"](), family="policy gradient"), laws=[]).failures


def test_log_probs_without_a_graph_are_not_declared() -> None:
    """Under no_grad or inference_mode no gradient goes through them, and the loss may be right."""
    right = policy_step()
    own: Any = right.logprobs

    @torch.inference_mode()
    def inside(model: nn.Module, batch: Mapping[str, Any]) -> Any:
        return own(model, batch)

    found = audit(replace(right, logprobs=inside), laws=[on_policy.LAW, clipping.LAW]).findings
    assert not [str(f) for f in found if f.outcome == "fails"]
    assert any(f.outcome == "not declared" and "with a graph" in f.meaning for f in found)
    assert {f.subject: f.outcome for f in found}["clip: inside the clip range"] == "holds"


def test_advantages_may_have_a_first_column_that_the_loss_cuts_off() -> None:
    def loss(model: nn.Module, batch: Mapping[str, Any], beta: float, clip: float) -> Any:
        return grpo_loss(model, {**batch, "advantages": batch["advantages"][:, -1]}, beta, clip)

    step = policy_step(loss)
    wide = step.batch["advantages"][:, None].expand(-1, step.batch["ids"].shape[1]).clone()
    found = audit(replace(step, batch={**step.batch, "advantages": wide}), laws=[on_policy.LAW])
    assert not found.errors and "descending the loss raises Σ A·lp" in outcomes(found.findings)


def test_a_generator_in_the_batch_is_refused() -> None:
    step = sft_step()
    with pytest.raises(EarnestError, match="a generator, which can be read only once: give a list"):
        audit(replace(step, batch={**step.batch, "texts": (text for text in "abcde")}))
    assert not audit(replace(step, batch={**step.batch, "texts": list("abcde")}), laws=[inputs.LAW]).failures


def test_ids_in_one_row_have_no_width() -> None:
    """`edits.readings` took the least of no widths."""

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        logs = model(batch["x"]).log_softmax(-1).flatten(0, 1)
        return -(logs.gather(-1, batch["ids"][:, None])[:, 0] * batch["advantages"].flatten()).mean()

    rng = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(4, 3, 5, generator=rng), "ids": torch.randint(0, 6, (12,), generator=rng),
             "advantages": torch.randn(4, 3, generator=rng)}  # fmt: skip
    roles = {"ids": "ids", "advantages": "advantages"}
    assert audit(Step(nn.Linear(5, 6), loss, batch, roles=roles), laws=[inputs.LAW]).holds


@pytest.mark.parametrize("whole", [True, False])
def test_a_model_without_trainable_parameters_fails(whole: bool) -> None:
    step = sft_step()
    step.model.requires_grad_(False)
    verdict = audit(step) if whole else audit(step.model, sft_loss, step.batch)
    (row,) = verdict.findings
    assert (row.law, row.outcome) == ("GL", "fails") and "Unfreeze what is trained" in row.meaning


@pytest.mark.may_not_be_checked
def test_what_could_not_be_checked_is_counted_and_no_pass_in_strict_mode() -> None:
    def raises(model: nn.Module, batch: Mapping[str, Any]) -> Any:
        if not torch.equal(batch["labels"], step.batch["labels"]):
            raise KeyError("other labels")
        return sft_loss(model, batch)

    step = sft_step()
    verdict = audit(replace(step, loss=raises), laws=[inputs.LAW, likelihood.LAW])
    assert verdict.holds and len(verdict.errors) == 1 and "1 could not be checked" in verdict.summary
    assert not verdict.strict().holds and not verdict.strict().errors
    assert audit(step, laws=[inputs.LAW, likelihood.LAW]).strict().holds


def test_a_loss_with_dimensions_is_refused() -> None:
    step = sft_step()
    bad = Step(model=step.model, loss=lambda m, b: m(b["ids"], b["attention"]).mean(-1), batch=step.batch)
    with pytest.raises(StepError, match=r"must be one number .* got shape \(5, 12\)"):
        audit(bad)


@dataclass
class Output:
    loss: Tensor


@pytest.mark.parametrize(
    "form",
    [
        lambda loss: {"loss": loss},
        lambda loss: CausalLMOutput(loss=loss),
        Output,
        lambda loss: (loss, None),
        lambda loss: (loss, loss[None]),
        lambda loss: (loss, {}, 1),
    ],
    ids=["dict", "model output", "object", "no metrics", "second is no dict", "three"],
)
def test_a_loss_may_come_in_any_usual_form(form: Callable[[Tensor], Any]) -> None:
    verdict = audit(sft_step(lambda m, b: form(sft_loss(m, b)[0])))
    assert verdict.holds, str(verdict)


@pytest.mark.parametrize("wrong", [lambda loss: None, lambda loss: {"value": loss}, lambda loss: loss.item()])
def test_another_return_is_refused_in_one_sentence(wrong: Callable[[Tensor], Any]) -> None:
    with pytest.raises(StepError, match=r"return loss or \(loss, dict of numbers\)"):
        audit(sft_step(lambda m, b: wrong(sft_loss(m, b)[0])))


def test_not_declared_is_never_a_pass() -> None:
    step = policy_step()
    bare = audit(Step(model=step.model, loss=lambda m, b: step.loss(m, b, beta=0.04, clip=0.2), batch=step.batch))
    missing = {f.law for f in bare.findings if f.outcome == "not declared"}
    assert {"GL", "KG", "MI", "CV"} <= missing
    assert all(f.meaning for f in bare.findings if f.outcome == "not declared"), "each says what to declare"
    full = audit(step)
    passed = [sum(f.outcome == "holds" for f in v.findings) for v in (bare, full)]
    assert passed[0] < passed[1]


def test_a_verdict_of_nothing_does_not_hold() -> None:
    nothing = Verdict(tuple(f for f in audit(policy_step(), quick=True).findings if f.outcome != "holds"))
    assert not nothing.holds and nothing.to_dict()["counts"]["holds"] == 0
    with pytest.raises(LawBroken, match="nothing was checked"):
        nothing.raise_if_failed()


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_cost_is_bounded(family: str, dtype: torch.dtype) -> None:
    """In step times, counted (a gradient 1, a look ⅓), not timed."""
    step = STEPS[family](dtype=dtype)
    full, quick = audit(step), audit(step, quick=True)
    assert full.cost <= most(step)
    assert quick.cost < full.cost


def test_the_counted_cost_is_the_real_one() -> None:
    """Nothing runs the loss after the counter's back."""
    step, calls = sft_step(), 0

    def counted(model: nn.Module, batch: Mapping[str, Any]) -> Any:
        nonlocal calls
        calls += 1 if torch.is_grad_enabled() else 1 / 3
        return sft_loss(model, batch)

    verdict = audit(Step(model=step.model, loss=counted, batch=step.batch, roles=step.roles, optimizer=step.optimizer))
    assert calls == pytest.approx(verdict.cost, abs=1.0)


def outcomes(findings: tuple[Finding, ...]) -> dict[str, str]:
    return {f.subject: f.outcome for f in findings}


def test_every_row_that_does_not_apply_has_its_reason() -> None:
    verdict = audit(policy_step(), laws=[masks.LAW, documents.LAW, coverage.LAW, shadow.LAW])
    reasons = {f.subject: f.measured for f in verdict.findings if f.outcome == "not applicable"}
    assert reasons == {
        "3 more columns of padding on the left": "no row of this batch begins with padding",
    }
    assert outcomes(verdict.findings)["another document in the packed row"] == "not declared", "nothing was said of it"
    coupled = audit(sft_step(rows_interact=True), laws=[masks.LAW]).findings
    assert outcomes(coupled)["a fully masked row"] == "not applicable"


def half_detached(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Reports twice what it descends."""
    loss, _ = sft_loss(model, batch)
    return loss + loss.detach()


def by_place(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Rows weigh by where they stand in the batch."""
    logits = model(batch["ids"], batch["attention"])[:, :-1].log_softmax(-1)
    labels = batch["labels"][:, 1:]
    each = -logits.gather(-1, labels.clamp_min(0)[..., None])[..., 0].float() * (labels >= 0)
    weight = torch.linspace(0.2, 1.8, labels.shape[0])
    return (each.sum(1) * weight).sum() / (labels >= 0).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("loss", "law"), [(half_detached, "FD"), (by_place, "SE")], ids=["reports twice", "weighs by place"]
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_coarse_dtype_does_not_hide_a_gross_fault(loss: Any, law: str, dtype: torch.dtype, seed: int) -> None:
    """What may differ follows from what was measured in bf16, not from a multiple of its eps that lets all pass."""
    assert law in {f.law for f in audit(sft_step(loss, dtype=dtype, seed=seed)).failures}
