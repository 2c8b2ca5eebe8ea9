"""No false alarm on this project's own steps: every objective, every adapter, every recipe, in fp32 and bf16."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import earnest as en
from earnest.adapters.conformance import subjects
from earnest.adapters.variant import get_variant
from earnest.engines import AdamW, LocalEngine
from earnest.engines.base import HiddenWanted, LogProbsWanted
from earnest.objectives import GRPO, Objective
from earnest.signals import Batch, Reference, Teacher
from tests.engines.conftest import VOCABULARY, kick, tiny_policy
from tests.objectives.support import GROUPS, LENGTHS, PAIRS, ROLES, examples

DTYPES = (torch.float32, torch.bfloat16)
TERMS = list(examples())
VARIANTS = list(subjects())


def names(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def engine_of(dtype: torch.dtype, seed: int, adapter: str = "lora") -> LocalEngine:
    policy = tiny_policy(dtype, seed)
    kind, settings = subjects()[adapter]
    variant = get_variant(kind, **settings)
    calibration = [torch.arange(3, 40)[None]] if variant.wants_calibration() else None
    made = en.attach(policy, variant, targets="all-linear", calibration=calibration, seed=seed)
    kick(made, seed + 1, size=0.1)
    return LocalEngine(policy, made, AdamW(lr=1e-2))


def batch_of(engine: LocalEngine, seed: int) -> Batch:
    """Every role and signal, each from the policy it would come from: a behaviour and a reference a kick away."""
    g = torch.Generator().manual_seed(seed + 50)
    prompts = [torch.randint(3, VOCABULARY, (2 + r % 3,), generator=g).tolist() for r in range(len(ROLES))]
    completions = [torch.randint(3, VOCABULARY, (n,), generator=g).tolist() for n in LENGTHS]
    batch = Batch.from_rows(prompts, completions, role=ROLES, group=GROUPS, pair=PAIRS, max_length=7)
    live = engine.score(batch, LogProbsWanted())
    base = engine.score(batch, HiddenWanted(), policy="base")
    states = engine.score(batch, HiddenWanted())
    assert isinstance(live, torch.Tensor)
    N = len(live)
    near = [(live.double() + 0.2 * torch.randn(N, generator=g)).clamp(max=0).to(live.dtype) for _ in range(3)]
    rollouts = batch.has_role(("rollout",))[batch.row]
    at = (rollouts & (batch.row != 1)).nonzero()[:, 0]  # row 1 has no teacher
    told = states.states[at]  # type: ignore[union-attr]
    told = told + 0.3 * torch.randn(told.shape, generator=g).to(told.dtype)
    return batch.with_signals(
        advantages=batch.per_token(torch.randn(len(batch), generator=g)),
        behaviour=near[0],
        proximal=near[1],
        reference=Reference(near[2], base),  # type: ignore[arg-type]
        teacher=Teacher(en.Hidden(told), at, "live"),
        correct=torch.tensor([True, False, True, True, False] + [False] * 6),
    )


@cache
def prepared(dtype: torch.dtype, seed: int) -> tuple[LocalEngine, Batch]:
    engine = engine_of(dtype, seed)
    return engine, batch_of(engine, seed)


def hold(engine: LocalEngine, objective: Objective, batch: Batch) -> None:
    verdict = en.prove(engine, objective, batch)
    assert verdict.holds, "\n".join(f"{f.law} {f.subject}: {f.measured}" for f in verdict.failures)


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("kind", TERMS)
def test_every_objective(kind: str, dtype: torch.dtype) -> None:
    hold(prepared(dtype, 0)[0], Objective.of(examples()[kind]), prepared(dtype, 0)[1])


SUMS: dict[str, Objective] = {
    "all four": en.GRPO(clip=0.2) + 0.5 * en.SDPO(top_k=4) + 0.1 * en.SimPO() + en.KLBarrier(tau=0.01),
    "sft + dpo": en.SFT() + 0.3 * en.DPO(),
    "grpo + sft": en.GRPO(clip=0.2) + 0.3 * en.SFT(),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_over_several_roles(name: str) -> None:
    hold(prepared(torch.float32, 0)[0], SUMS[name], prepared(torch.float32, 0)[1])


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("adapter", VARIANTS)
def test_every_adapter(adapter: str, dtype: torch.dtype) -> None:
    engine = engine_of(dtype, 1, adapter)
    hold(engine, Objective.of(GRPO(clip=0.2)), batch_of(engine, 1))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_over_seeds(dtype: torch.dtype, seed: int) -> None:
    engine = engine_of(dtype, seed)
    batch = batch_of(engine, seed)
    for term in examples().values():
        hold(engine, Objective.of(term), batch)
    for adapter in VARIANTS:
        other = engine_of(dtype, seed, adapter)
        hold(other, Objective.of(GRPO(clip=0.2)), batch_of(other, seed))
