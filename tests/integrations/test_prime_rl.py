"""The custom loss for PRIME-RL, against the fields and the arithmetic of its trainer.

PRIME-RL itself needs NVIDIA GPUs. What is fixed here is its contract: the fields of ``LossInputs`` and
``LossOutputs`` (prime_rl_contract.json: read by ``ast`` from its source, at the commit that stands there), the dotted
import, a sum over tokens for each sequence, and one division by the global token count.
"""

from __future__ import annotations

import ast
import importlib
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from earnest.errors import ConfigError, EarnestError, SignalError
from earnest.integrations import prime_rl
from earnest.objectives import OBJECTIVES, Objective
from earnest.objectives.needs import LogProb
from earnest.objectives.registry import build, build_objective
from earnest.objectives.view import Field
from earnest.signals import Batch, Reference

CONTRACT = json.loads(Path(__file__).with_name("prime_rl_contract.json").read_text())
INPUTS = [name for name, _, _ in CONTRACT["LossInputs"]]


@dataclass
class LossInputs:
    """The trainer's side of the contract."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = field(default=None)


def sequence(length: int, seed: int, *, reference: bool = True) -> LossInputs:
    g = torch.Generator().manual_seed(seed)
    lp = -torch.rand(length, generator=g) * 3
    return LossInputs(
        trainer_logprobs=lp.clone().requires_grad_(),
        inference_logprobs=(lp + 0.4 * torch.randn(length, generator=g)).clamp(max=0),
        ref_logprobs=(lp + 0.4 * torch.randn(length, generator=g)).clamp(max=0) if reference else None,
        advantages=torch.randn(1, generator=g).expand(length).clone(),
        loss_mask=torch.arange(length) >= 1,
    )


def trainer_step(sequences: Sequence[LossInputs], **kwargs: Any) -> Tensor:
    """PRIME-RL's rl component: import by dotted path, a sum over sequences, one division by all masked tokens."""
    module, _, name = prime_rl.PATH.rpartition(".")
    custom = getattr(importlib.import_module(module), name)
    tokens = sum(int(s.loss_mask.sum()) for s in sequences)
    return sum((custom(s, **kwargs).loss for s in sequences), torch.zeros(())) / tokens


@pytest.mark.parametrize("name", ["LossInputs", "LossOutputs"])
def test_the_contract_has_the_fields_of_the_real_one(name: str) -> None:
    """Names in their order, and types as written; the class that the tests pass has the same names and defaults."""
    real = CONTRACT[name]
    ours = getattr(prime_rl, name).__annotations__.items()
    assert [(key, _plain(kind)) for key, kind in ours] == [(key, _plain(kind)) for key, kind, _ in real]
    passed = fields(LossInputs if name == "LossInputs" else prime_rl.LossOutputs)
    given = [(f.name, "required" if f.default is MISSING else f"default {f.default}") for f in passed]
    assert given == [(key, default) for key, _, default in real]


def _plain(annotation: str) -> str:
    return ast.unparse(ast.parse(annotation, mode="eval"))


def test_by_hand() -> None:
    """ρ = 2, 0.5, 1.1 with A = 1, -1, 1 under ε = 0.2 (above: 0.3): -min(2, 1.3), -min(-0.5, -0.8), -1.1.

    The fourth token has no mask: nothing of it counts, whatever it holds.
    """
    q = torch.tensor([0.1, 0.4, 0.5, 0.5]).log()
    inputs = LossInputs(
        trainer_logprobs=(q + torch.tensor([2.0, 0.5, 1.1, 1.9]).log()).requires_grad_(),
        inference_logprobs=q,
        ref_logprobs=None,
        advantages=torch.tensor([1.0, -1.0, 1.0, 100.0]),
        loss_mask=torch.tensor([True, True, True, False]),
    )
    found = prime_rl.loss(inputs, clip=0.2, clip_high=0.3)
    assert found.loss.item() == pytest.approx(-1.3 + 0.8 - 1.1)
    found.loss.backward()
    assert inputs.trainer_logprobs.grad is not None
    # both clipped tokens are cut off; the third has d(-ρA)/dlp = -1.1
    assert inputs.trainer_logprobs.grad.tolist() == pytest.approx([0.0, 0.0, -1.1, 0.0])
    assert found.metrics["earnest/dapo/clip_high"].item() == pytest.approx(1 / 3)
    assert found.metrics["earnest/dapo/clip_low"].item() == pytest.approx(1 / 3)
    assert all(m.shape == () and not m.requires_grad for m in found.metrics.values())


@pytest.mark.parametrize(
    "objective",
    [
        [{"kind": "dapo", "clip": 0.1, "clip_high": 0.2, "dual_clip": 3.0}],
        [{"kind": "cispo", "max_ratio": 1.2}],
        [{"kind": "reinforce"}],
        [{"kind": "dapo"}, {"kind": "reference_kl", "weight": 0.3, "per": "token", "estimator": "k3"}],
        [{"kind": "reference_kl", "per": "token", "importance": "attached", "estimator": "k3"}],
    ],
)
def test_the_trainer_ends_in_the_gradient_that_earnest_has_on_the_whole_batch(objective: list[dict[str, Any]]) -> None:
    """Three sequences one at a time, summed and divided, against one evaluation of the objective over all of them."""
    sequences = [sequence(n, seed) for seed, n in enumerate((5, 2, 9))]
    trained = trainer_step(sequences, objective=objective)
    trained.backward()
    got = torch.cat([s.trainer_logprobs.grad[s.loss_mask] for s in sequences])  # type: ignore[index]

    lengths = [int(s.loss_mask.sum()) for s in sequences]
    flat = torch.cat([s.trainer_logprobs.detach()[s.loss_mask] for s in sequences]).requires_grad_()
    batch = Batch.from_rows(
        [[0]] * 3,
        [[1] * n for n in lengths],
        advantages=[s.advantages[s.loss_mask].tolist() for s in sequences],
        behaviour=[s.inference_logprobs[s.loss_mask].tolist() for s in sequences],
    ).with_signals(
        reference=Reference(logprobs=torch.cat([s.ref_logprobs[s.loss_mask] for s in sequences]))  # type: ignore[index]
    )
    made = build_objective(objective)
    whole = made.evaluate(batch, {LogProb(): Field(flat)}, made.initial_state())
    whole.loss.backward()
    assert trained.item() == pytest.approx(whole.loss.item(), rel=1e-5)
    torch.testing.assert_close(got, flat.grad)


@pytest.mark.parametrize("name", INPUTS)
def test_every_input_matters(name: str) -> None:
    """Each field, moved a little, moves the loss; so none is read from the wrong place or not at all."""
    kwargs = {"objective": [{"kind": "dapo"}, {"kind": "reference_kl", "per": "token", "weight": 0.1}]}
    base = replace(sequence(6, 3), loss_weights=torch.full((6,), 0.5))
    before = prime_rl.loss(base, **kwargs).loss.item()
    value = getattr(base, name).detach()
    moved = value ^ (torch.arange(6) == 2) if value.dtype is torch.bool else value * 1.1 - 0.01
    assert prime_rl.loss(replace(base, **{name: moved}), **kwargs).loss.item() != pytest.approx(before, rel=1e-3)


def test_on_policy_the_gradient_is_reinforce() -> None:
    inputs = sequence(7, 1)
    inputs = replace(inputs, inference_logprobs=inputs.trainer_logprobs.detach().clone())
    prime_rl.loss(inputs).loss.backward()
    expected = torch.where(inputs.loss_mask, -inputs.advantages, 0.0)
    torch.testing.assert_close(inputs.trainer_logprobs.grad, expected)


@given(
    weights=st.lists(st.floats(0, 3, width=32), min_size=4, max_size=4),
    mask=st.lists(st.booleans(), min_size=4, max_size=4),
    seed=st.integers(0, 50),
)
def test_the_sum_is_linear_in_the_weights_and_ignores_masked_tokens(
    weights: list[float], mask: list[bool], seed: int
) -> None:
    base = replace(sequence(4, seed), loss_mask=torch.tensor(mask))
    each = [
        prime_rl.loss(replace(base, loss_mask=torch.arange(4) == t)).loss.item() if mask[t] else 0.0 for t in range(4)
    ]
    whole = prime_rl.loss(replace(base, loss_weights=torch.tensor(weights))).loss
    assert whole.item() == pytest.approx(math.fsum(w * x for w, x in zip(weights, each, strict=True)), abs=1e-4)
    whole.backward()
    assert base.trainer_logprobs.grad is not None
    assert not base.trainer_logprobs.grad[~torch.tensor(mask)].any()
    junk = torch.where(torch.tensor(mask), base.advantages, torch.nan)
    assert prime_rl.loss(replace(base, advantages=junk, loss_weights=torch.tensor(weights))).loss.item() == whole.item()


def test_a_sequence_without_a_masked_token_is_a_zero_that_can_go_backward() -> None:
    inputs = replace(sequence(3, 0), loss_mask=torch.zeros(3, dtype=torch.bool))
    found = prime_rl.loss(inputs)
    found.loss.backward()
    assert found.loss.item() == 0 and found.metrics == {}
    assert inputs.trainer_logprobs.grad is not None and not inputs.trainer_logprobs.grad.any()


ALLOWED = {"dapo", "cispo", "reinforce"}
LOGITS = {"distill", "sdpo", "taid", "entropy_aware", "kl_barrier", "entropy", "spectral_cap"}
NORMALISED = {"grpo", "bnpo", "dr_grpo", "sapo", "gspo", "luspo", "rloo", "reference_kl"}
OTHER_ROWS = {"sft", "dpo", "simpo", "kto"}


def test_every_term_is_allowed_or_refused_with_its_reason() -> None:
    """By default settings; a term that a later version adds has to be judged here too."""
    reasons: dict[str, str] = {}
    for kind in OBJECTIVES:
        try:
            prime_rl.refuse_unless_per_token(OBJECTIVES[kind].example())
        except ConfigError as error:
            reasons[kind] = str(error)
    assert set(OBJECTIVES) - set(reasons) == ALLOWED
    assert {k for k, why in reasons.items() if "one log-prob per token" in why} == LOGITS
    assert {k for k, why in reasons.items() if "divides by something else" in why} == NORMALISED
    assert {k for k, why in reasons.items() if "one rollout at a time" in why} == OTHER_ROWS


@pytest.mark.parametrize(
    ("kwargs", "why"),
    [
        ({"objective": [{"kind": "sdpo", "top_k": 20}]}, "sdpo: needs teacher, Divergence, .* one log-prob per token"),
        ({"objective": [{"kind": "grpo"}]}, "grpo: divides by something else than the number of tokens"),
        ({"correction": {"cap": 2.0}}, "dapo: needs proximal, which PRIME-RL does not pass"),
        ({"route": "correct"}, "dapo: needs correct, which PRIME-RL does not pass"),
        ({"clip_eps": 0.2}, r"dapo\.clip_eps: unknown key; did you mean 'clip'"),
        ({"clip": -1.0}, "clip"),
        ({"objective": [{"kind": "dapo"}], "clip": 0.2}, "clip: with `objective` every field belongs into its term"),
        ({"objective": [{"kind": "dapo", "weight": 0}]}, "nothing would be trained"),
        ({"objective": []}, "no term"),
    ],
)
def test_a_wrong_configuration_is_refused_before_a_token_is_seen(kwargs: dict[str, Any], why: str) -> None:
    with pytest.raises(EarnestError, match=why):
        prime_rl.configure(**kwargs)
    with pytest.raises(EarnestError, match=why):
        prime_rl.loss(None, **kwargs)


def test_a_missing_reference_is_an_error_and_never_zero() -> None:
    kwargs = {"objective": [{"kind": "reference_kl", "per": "token"}]}
    with pytest.raises(SignalError, match=r"reference_kl: needs the signal 'reference\.logprobs'"):
        prime_rl.loss(sequence(4, 0, reference=False), **kwargs)
    with pytest.raises(SignalError, match=r"advantages has shape \(1,\)"):
        prime_rl.loss(replace(sequence(4, 0), advantages=torch.ones(1)))


def test_the_check_reads_the_trainers_file(tmp_path: Path) -> None:
    """In a process of its own, as a user runs it; the table may be PRIME-RL's `rl` file or the trainer's alone."""
    good, bad = tmp_path / "rl.toml", tmp_path / "trainer.toml"
    head = f'type = "custom"\nimport_path = "{prime_rl.PATH}"\n'
    good.write_text(f"[trainer.loss]\n{head}[trainer.loss.kwargs]\nclip = 0.1\n")
    bad.write_text(f'[loss]\n{head}[[loss.kwargs.objective]]\nkind = "distill"\n')
    run = [sys.executable, "-m", "earnest.integrations.prime_rl"]
    done = [subprocess.run([*run, str(f)], check=False, capture_output=True, text=True) for f in (good, bad)]
    assert [d.returncode for d in done] == [0, 2], done
    assert "DAPO(" in done[0].stdout and "clip=0.1" in done[0].stdout
    assert done[1].stderr.startswith("earnest: distill: needs teacher")
    other = "[trainer.loss]\ntype='custom'\nimport_path='mine.loss'"
    for text, why in (
        ("[trainer.loss]\ntype='default'", "has type 'default'"),
        (other, "import_path 'mine.loss'"),
        ("=", "is not TOML"),
    ):
        bad.write_text(text)
        with pytest.raises(ConfigError, match=why):
            prime_rl.check_file(bad)
    with pytest.raises(ConfigError, match="cannot be read"):
        prime_rl.check_file(tmp_path / "none.toml")


def test_the_objective_is_built_once_for_each_setting() -> None:
    prime_rl.loss(sequence(3, 0), clip=0.123)
    before = prime_rl._configured.cache_info().misses
    prime_rl.loss(sequence(3, 1), clip=0.123)
    assert prime_rl._configured.cache_info().misses == before
    assert isinstance(prime_rl.configure().args[0], Objective)  # type: ignore[attr-defined]
    assert build("dapo").label == "dapo"
