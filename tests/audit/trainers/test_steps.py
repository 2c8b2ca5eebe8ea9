"""The ``Step`` that is made of a trainer: packed rows by their positions, routers that couple rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from earnest_audit import Step, Verdict, audit
from earnest_audit.frontends.trainers import step_of_trainer
from earnest_audit.laws import documents, splits
from tests.audit.trainers.cases import llama


def outcomes(verdict: Verdict) -> dict[str, str]:
    return {f.subject: f.outcome for f in verdict.findings}


def trainers_step(model: nn.Module, inputs: dict[str, Tensor]) -> Step:
    trainer = SimpleNamespace(args=SimpleNamespace(seed=0), optimizer=None)
    return step_of_trainer(
        trainer, model, inputs, lambda m, batch, num_items_in_batch: m(**batch, use_cache=False).loss
    )


@pytest.mark.parametrize("shown", [False, True])
def test_a_packed_row_is_known_by_its_positions(shown: bool) -> None:
    """transformers keeps packed documents apart by their position ids, unless an all-ones mask says otherwise."""
    ids = torch.randint(3, 19, (1, 16), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in (7, 5, 4)])[None]
    inputs = {"input_ids": ids, "labels": ids.clone(), "position_ids": positions}
    step = trainers_step(llama(0, torch.float32), inputs | ({"attention_mask": torch.ones_like(ids)} if shown else {}))
    assert step.batch[step.roles["documents"]].tolist() == [[0] * 7 + [1] * 5 + [2] * 4]
    verdict = audit(step, laws=[documents.LAW])
    assert outcomes(verdict)[documents.PACKED] == ("fails" if shown else "holds"), str(verdict)


def test_padding_is_no_document_and_a_plain_row_declares_none() -> None:
    ids = torch.randint(3, 19, (2, 6), generator=torch.Generator().manual_seed(0))
    padded = torch.tensor([[1, 1, 0, 1, 2, 3], [0, 1, 2, 3, 0, 0]])
    shown = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    inputs = {"input_ids": ids, "labels": ids.clone(), "position_ids": padded, "attention_mask": shown}
    step = trainers_step(llama(0, torch.float32), inputs)
    assert "documents" not in step.roles
    verdict = audit(step, laws=[documents.LAW])
    assert outcomes(verdict)[documents.PACKED] == "not declared", str(verdict)


def test_what_is_padded_with_the_rows_is_declared() -> None:
    """Prompts may be as wide as completions by accident; a tensor that is not known stays a guess."""
    ids = torch.randint(3, 19, (2, 6), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "labels": ids.clone(), "prompt_ids": ids.clone(), "prompt_mask": torch.ones_like(ids)}
    model = llama(0, torch.float32)
    assert trainers_step(model, inputs).wide == ["input_ids", "labels"]
    assert trainers_step(model, {**inputs, "mine": ids.clone()}).wide is None


@pytest.mark.parametrize("balanced", [False, True])
def test_a_router_that_is_balanced_couples_the_rows(balanced: bool) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=19, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1, max_position_embeddings=32,
        output_router_logits=balanced, router_aux_loss_coef=0.5,
    )  # fmt: skip
    ids = torch.randint(3, 19, (4, 8), generator=torch.Generator().manual_seed(0))
    step = trainers_step(MixtralForCausalLM(config), {"input_ids": ids, "labels": ids.clone()})
    assert step.rows_interact == balanced
    assert step.may_idle == ("*.experts.*",) and not trainers_step(llama(0, torch.float32), dict(step.batch)).may_idle
    verdict = audit(step, laws=[splits.LAW])
    assert verdict.holds, str(verdict)
