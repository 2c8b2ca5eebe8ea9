"""What an audit borrows (dropout, the optimizer, the batch, gradients), and what it makes of steps that refuse, sample
or overflow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from earnest.audit import Step, audit
from earnest.audit.gradient import Gradient
from earnest.audit.laws import inputs, knobs, liveness, masks, splits
from earnest.audit.probe import fresh
from earnest.audit.verdict import Verdict
from tests.audit.steps import Tiny, logprobs, policy_step, sft_loss, sft_step, token_batch

RIGHT = "3 more columns of padding on the right"


def measured(verdict: Verdict) -> dict[str, str]:
    return {f.subject: f.measured for f in verdict.findings}


# --- dropout ----------------------------------------------------------------------------------------------------------


class Dropped(Tiny):
    """A dropout module, a functional rate, and a running statistic that must stay in train mode."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.drop, self.attention_dropout = nn.Dropout(0.1), 0.2
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor, attention: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        assert self.training and self.drop.training, "the audit changes no mode"
        y = self.drop(super().forward(ids, attention, documents))
        return F.dropout(y, self.attention_dropout, self.training)


def on(model: nn.Module, loss: Any = sft_loss, **more: Any) -> Step:
    step = sft_step()
    return Step(model=model, loss=loss, batch=step.batch, roles=step.roles, **more)


def test_dropout_is_off_while_audited_and_back_afterwards() -> None:
    model = Dropped()
    verdict = audit(on(model))
    assert verdict.holds, str(verdict)
    assert (model.drop.p, model.attention_dropout) == (0.1, 0.2)
    assert str(verdict).count("dropout was switched off for the audit (2 rates above 0)") == 1
    assert not audit(on(Tiny()), quick=True).notes


def test_dropout_of_a_hugging_face_model() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=23, n_positions=32, n_embd=8, n_layer=1, n_head=2))
    model.train()

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        return model(input_ids=batch["ids"], attention_mask=batch["attention"], labels=batch["labels"]).loss

    verdict = audit(on(model, loss), laws=[splits.LAW, masks.LAW])
    assert verdict.holds and verdict.notes, str(verdict)
    rates = (model.config.attn_pdrop, model.config.resid_pdrop, model.config.embd_pdrop, model.transformer.drop.p)
    assert rates == (0.1,) * 4


def test_a_step_that_samples_is_not_asked_about_rows() -> None:
    def noisy(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        logits = model(batch["ids"], batch["attention"])[:, :-1]
        logits = logits * torch.rand(logits.shape)
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())

    verdict = audit(on(Tiny(), noisy), laws=[liveness.LAW, splits.LAW, masks.LAW])
    assert verdict.holds, str(verdict)
    found = measured(verdict)
    for subject in ("permuted, repeated or cut rows", RIGHT):
        assert found[subject] == "the step is random"


# --- the optimizer ----------------------------------------------------------------------------------------------------


class Master(torch.optim.Optimizer):
    """fp32 master weights of bf16 parameters."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.updates = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.updates += 1
        for group in self.param_groups:
            for p in group["params"]:
                master = self.state[p].setdefault("master", p.float().clone())
                master -= group["lr"] * p.grad.float()
                p.copy_(master)


def test_the_optimizer_is_put_back_into_the_same_objects() -> None:
    step, model = sft_step(), Tiny().bfloat16()
    optimizer, updates = Master(model.parameters()), 0

    def count(*_: Any) -> None:
        nonlocal updates
        updates += 1

    handle = optimizer.register_step_post_hook(count)
    sft_loss(model, step.batch)[0].backward()
    optimizer.step()
    optimizer.zero_grad()
    group, master = optimizer.param_groups[0], optimizer.state[model.head.weight]["master"]
    bits = master.clone()
    verdict = audit(on(model, optimizer=optimizer), laws=[liveness.LAW])
    assert any("changed their bits" in f.measured and f.outcome == "holds" for f in verdict.findings)
    assert optimizer.param_groups[0] is group and group["lr"] == 0.01
    assert optimizer.state[model.head.weight]["master"] is master
    assert master.dtype == torch.float32 and master.equal(bits) and not bits.equal(bits.bfloat16().float())
    assert updates == optimizer.updates == 1, "neither the hook nor the optimizer has seen the audit's updates"
    assert list(optimizer._optimizer_step_post_hooks.values()) == [count]
    handle.remove()
    assert not optimizer._optimizer_step_post_hooks


# --- checkpointing ----------------------------------------------------------------------------------------------------


class Checkpointed(Tiny):
    """Two blocks; below the first lies no parameter where the embedding is frozen: ``autograd.grad`` passes it by."""

    def __init__(self, reentrant: bool, frozen: bool) -> None:
        super().__init__(0)
        self.reentrant = reentrant
        self.embed.requires_grad_(not frozen)

    def forward(self, ids: Tensor, attention: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        if torch.is_grad_enabled() and not x.requires_grad:
            x.requires_grad_(True)  # what enable_input_require_grads does
        y: Tensor = checkpoint(self.mix, x, use_reentrant=self.reentrant)
        return self.head(torch.tanh(checkpoint(self.out, y.chunk(3, -1)[0], use_reentrant=self.reentrant)))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("family", [sft_step, policy_step])
def test_reentrant_checkpointing_is_audited_like_any_other(family: Callable[[], Step], frozen: bool) -> None:
    found = []
    for reentrant in (True, False):
        step, model = family(), Checkpointed(reentrant, frozen)
        trained = [p for p in model.parameters() if p.requires_grad]
        step.model, step.optimizer = model, torch.optim.AdamW(trained, lr=1e-2)
        step.roles = {r: k for r, k in step.roles.items() if r != "attention"}
        kept, updates = torch.ones_like(model.head.weight), []
        model.head.weight.grad = kept
        model.head.weight.register_post_accumulate_grad_hook(updates.append)
        verdict = audit(step)
        assert verdict.holds, str(verdict)
        assert model.head.weight.grad is kept and bool((kept == 1).all()) and not updates
        assert model.head.weight._post_accumulate_grad_hooks
        found.append(verdict.findings)
    assert found[0] == found[1]


# --- batches ----------------------------------------------------------------------------------------------------------


def nested_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Rows are weighed by what lists, arrays and nested dicts say, and all of them are written into."""
    weights = [row["w"] for row in batch["meta"]]
    total = torch.tensor(weights) * torch.from_numpy(batch["array"]) * batch["deep"]["inner"]["t"]
    total = total * torch.tensor([float(len(name)) for name in batch["names"]])
    batch["deep"]["inner"]["t"] += 1
    batch["array"] += 1
    batch["meta"].append({"w": 0.0})
    mask = (batch["labels"][:, 1:] != -100).float()
    return -(total[:, None] * logprobs(model, batch) * mask).sum() / mask.sum()


def test_lists_arrays_and_nested_dicts_go_with_their_rows() -> None:
    step = sft_step()
    batch = {
        **step.batch,
        "meta": [{"w": 0.5 + r} for r in range(5)],
        "array": np.linspace(1, 2, 5, dtype=np.float32),
        "names": ("a", "bb", "ccc", "dd", "e"),
        "deep": {"inner": {"t": torch.linspace(2, 1, 5)}, "text": "five5"},
    }
    before = fresh(batch)
    verdict = audit(
        Step(model=step.model, loss=nested_loss, batch=batch, roles=step.roles, value_is_loss=True),
        laws=[splits.LAW, masks.LAW],
    )
    assert verdict.holds, str(verdict)
    assert batch["meta"] == before["meta"] and np.array_equal(batch["array"], before["array"])
    assert batch["deep"]["inner"]["t"].equal(before["deep"]["inner"]["t"])
    assert measured(verdict)["permuted, and every row twice"].startswith("1×")


# --- NaN, integers, refusals ------------------------------------------------------------------------------------------


def test_nan_is_far_from_everything() -> None:
    nan, one = Gradient({"p": torch.tensor([float("nan"), 1.0])}), Gradient({"p": torch.ones(2)})
    assert nan.distance(one) == one.distance(nan) == nan.distance(nan) == float("inf")


def test_a_gradient_that_is_nan_off_policy_is_said_once() -> None:
    model, batch = Tiny(), token_batch()
    with torch.no_grad():
        batch["ref"] = (logprobs(model, batch) - 0.5) * batch["mask"]

    def rooted(model: nn.Module, batch: Mapping[str, Any], beta: float) -> Tensor:
        now, mask = logprobs(model, batch), batch["mask"]
        gap = torch.where(mask != 0, now - batch["ref"], 1.0)
        return (((gap.sqrt() * beta) - now) * mask).sum() / mask.sum()

    roles = {"ids": "ids", "attention": "attention", "mask": "mask", "reference": "ref"}
    step = Step(model=model, loss=rooted, batch=batch, roles=roles, knobs={"beta": 0.1})
    verdict = audit(step, laws=[liveness.LAW, inputs.LAW, knobs.LAW, masks.LAW])
    assert [(f.law, f.measured) for f in verdict.failures] == [("IG", "not finite off-policy")]
    assert [f.law for f in verdict.findings if f.measured == "not finite off-policy"] == ["IG", "KG", "MI"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("ignored", [False, True])
def test_rewards_may_be_integers(dtype: torch.dtype, ignored: bool) -> None:
    """A baseline hides what is added to every row alike; groups of two hide it within the group."""
    batch = token_batch()
    batch = {k: v[:4] for k, v in batch.items()} | {"rewards": torch.tensor([1, 0, 0, 1]).to(dtype)}

    def reinforce(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        rewards = torch.tensor([1.0, 0, 0, 1]) if ignored else batch["rewards"].float()
        pairs = rewards.reshape(-1, 2)
        advantages = (pairs - pairs.mean(-1, keepdim=True)).flatten()[:, None]
        return -(advantages * logprobs(model, batch) * batch["mask"]).sum() / batch["mask"].sum()

    roles = {"ids": "ids", "mask": "mask", "rewards": "rewards"}
    verdict = audit(Step(model=Tiny(), loss=reinforce, batch=batch, roles=roles), laws=[inputs.LAW])
    assert bool(verdict.failures) == ignored, str(verdict)


@pytest.mark.may_not_be_checked
def test_a_step_that_refuses_changes_is_audited_all_the_same() -> None:
    """Asserts on a knob, on the number of rows and on the width: each is a row, none ends the audit."""

    def strict(model: nn.Module, batch: Mapping[str, Any], share: float, weight: float) -> Any:
        assert 0 <= share <= 0.6 and weight <= 1
        if batch["ids"].shape != (5, 12):
            raise NotImplementedError("five rows of twelve")
        value = sft_loss(model, batch)[0]
        return value * (1 + share) + weight * value.square(), {"square": value.square()}

    step = on(Tiny(), strict, knobs={"share": 0.5, "weight": 0.7}, terms={"square": "weight"})
    verdict = audit(step, laws=[liveness.LAW, knobs.LAW, splits.LAW, masks.LAW])
    assert verdict.holds, str(verdict)
    found = measured(verdict)
    assert found["knob share"].startswith("0.5 → 0.25 moved")
    assert found["term square"].startswith("could not be checked (AssertionError")
    assert found["every row twice"] == "could not be checked (NotImplementedError: five rows of twelve)"
    assert found["whole = parts"] == "a part of the rows cannot be run alone (NotImplementedError)"
    assert found["a fully masked row"] == "one more row cannot be run (NotImplementedError)"
    assert {f.subject for f in verdict.errors} == {"term square", "every row twice"}
