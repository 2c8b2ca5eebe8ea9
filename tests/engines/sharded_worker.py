"""One rank of the group that ``test_sharded`` starts: every check compares the mesh with one process.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… python -m tests.engines.sharded_worker OUT
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import earnest as en
from earnest.adapters import split
from earnest.adapters.cases import SUBJECTS
from earnest.adapters.errors import AdapterError
from earnest.adapters.files import load_adapter
from earnest.adapters.linalg import gathered
from earnest.adapters.variant import VARIANTS
from earnest.engines import (
    AdamW,
    AtIdsWanted,
    HiddenWanted,
    LocalEngine,
    LogitsWanted,
    LogProbsWanted,
    TopKWanted,
    local,
    sharding,
)
from earnest.engines import mesh as meshes
from earnest.engines.base import Rollout
from earnest.engines.mesh import Mesh
from earnest.engines.muon import Muon
from earnest.engines.sharding import held_bytes
from earnest.engines.trained import Trained
from earnest.errors import ConfigError, EarnestError, ObjectiveError, SignalError
from earnest.guards import Directions, Erase, PerturbRoute, Route
from earnest.models import Policy
from earnest.models.sampling import SampleSpec
from earnest.objectives import GRPO, SpectralCap
from earnest.objectives.base import Objective
from earnest.objectives.needs import SpectralNorm
from earnest.signals import Batch, EMATeacher
from earnest.sync.base import Weights, logprobs, rows_batch
from earnest.sync.pool import SamplerPool
from tests.engines.cases import every_signal
from tests.engines.conftest import perturb, tiny_policy
from tests.engines.test_local import RootMeanSquare
from tests.objectives.support import examples

TARGETS = ("q_proj", "v_proj", "down_proj")
CHECKS: dict[str, Callable[[], None]] = {}
MESH = Mesh()
LONG = os.environ.get("LONG") == "1"
"""Nightly: more steps, and every example of an adapter instead of one."""


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def engine(mesh: Mesh | None, variant: Any = None, **settings: Any) -> LocalEngine:
    policy = tiny_policy(settings.pop("dtype", torch.float64))
    targets = settings.pop("targets", TARGETS)
    saved = settings.pop("modules_to_save", None)
    adapter = en.attach(policy, variant or en.LoRA(rank=3), targets=targets, seed=0, modules_to_save=saved)
    perturb(adapter, size=settings.pop("size", 0.1))
    if "guard" in settings:
        settings["guard"] = settings["guard"](adapter)
    if "outer" in settings:
        settings["outer"] = settings["outer"](adapter)
    settings.setdefault("micro_tokens", 40)
    optimizer = settings.pop("optimizer", AdamW)(lr=settings.pop("lr", 1e-2))
    return LocalEngine(policy, adapter, optimizer, mesh=mesh, **settings)


def pair(variant: Any = None, **settings: Any) -> tuple[LocalEngine, LocalEngine, Batch]:
    """The engine on the mesh, the one of one process, and a batch for every term."""
    alone = engine(None, variant, **settings)
    return engine(MESH, variant, **settings), alone, every_signal(alone)


def equal(a: Any, b: Any, tolerance: float = 3e-6, what: str = "") -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys(), (what, sorted(a), sorted(b))
        for key in a:
            equal(a[key], b[key], tolerance, f"{what} {key}")
    elif isinstance(a, torch.Tensor):
        scale = max(float(b.abs().max()), 1e-9)
        assert float((a - b).abs().max()) <= tolerance * scale, (what, float((a - b).abs().max()), scale)
    elif isinstance(a, float):
        assert a == b or abs(a - b) <= tolerance * max(abs(a), abs(b), 0.1) or (a != a and b != b), (what, a, b)
    else:
        assert a == b, (what, a, b)


@check
def every_term_has_the_gradient_of_one_process() -> None:
    sharded, alone, batch = pair()
    terms = {k: t for k, t in examples().items() if "batch_local" not in t.laws}
    for kind, term in terms.items():
        equal(sharded.gradients(batch, term), alone.gradients(batch, term), 2e-5, kind)
    whole = GRPO(clip=0.2) + 0.3 * RootMeanSquare()
    equal(sharded.gradients(batch, whole), alone.gradients(batch, whole), what="two passes")


@check
def every_adapter_has_the_gradient_of_one_process() -> None:
    tested: set[str] = set()
    for name, (kind, settings) in sorted(SUBJECTS.items()):
        if kind in tested and not LONG:
            continue
        try:
            sharded, alone, batch = pair(VARIANTS[kind](**settings))
        except AdapterError:  # a rank above this model's, or one that is calibrated on data
            continue
        equal(sharded.gradients(batch, GRPO()), alone.gradients(batch, GRPO()), 1e-4, name)
        tested.add(kind)
    assert {k for k in VARIANTS if not VARIANTS[k]().wants_calibration()} <= tested, tested


def every_adapter_and_every_term() -> None:
    """Slow: all adapters × all terms."""
    terms = {k: t for k, t in examples().items() if "batch_local" not in t.laws}
    for name, (kind, settings) in sorted(SUBJECTS.items()):
        try:
            sharded, alone, batch = pair(VARIANTS[kind](**settings))
        except AdapterError:
            continue
        for label, term in terms.items():
            try:
                theirs = alone.gradients(batch, term)
            except (ObjectiveError, SignalError):
                continue
            equal(sharded.gradients(batch, term), theirs, 1e-4, f"{name} {label}")


SLOW: dict[str, Callable[[], None]] = {"every_adapter_and_every_term": every_adapter_and_every_term}


@check
def a_step_reports_what_one_process_reports_and_many_steps_stay_together() -> None:
    sharded, alone, batch = pair(max_grad_norm=0.05, lr=1e-3)
    objective = GRPO(clip=0.2) + 0.1 * en.SFT() + 0.1 * en.DPO()
    for number in range(50 if LONG else 10):
        ours, theirs = (e.step(batch, objective, shares=number == 0) for e in (sharded, alone))
        assert theirs.update.clip_factor < 1
        equal(ours.loss, theirs.loss, 1e-3, "loss")
        equal(ours.update.gradient_norm, theirs.update.gradient_norm, 1e-3, "norm")
        equal(ours.update.update_norm, theirs.update.update_norm, 1e-3, "update")
        for label, term in theirs.terms.items():
            equal(dict(ours.terms[label].metrics), dict(term.metrics), 1e-3, label)
    assert MESH.shard == 1 or f"base in {MESH.shard} shards, head gathered" in ours.layout
    equal(sharded.adapter.state_dict(), alone.adapter.state_dict(), 2e-3, "weights")
    assert sharded.policy.fingerprint() == alone.policy.fingerprint()


FULL: dict[str, Any] = {"variant": en.Full(), "targets": "all", "size": 0.02}


@check
def full_parameter_training_is_that_of_one_process() -> None:
    sharded, alone, batch = pair(**FULL, max_grad_norm=0.05, lr=1e-4, outer=EMATeacher)
    objective = GRPO(clip=0.2) + 0.1 * en.SFT() + 0.1 * en.DPO()
    equal(sharded.gradients(batch, objective), alone.gradients(batch, objective), 2e-5, "gradient")
    for number in range(20 if LONG else 6):
        ours, theirs = (e.step(batch, objective, shares=number == 0) for e in (sharded, alone))
        assert theirs.update.clip_factor < 1
        equal(ours.loss, theirs.loss, 1e-3, "loss")
        equal(ours.update.gradient_norm, theirs.update.gradient_norm, 1e-3, "norm")
        equal(ours.update.update_norm, theirs.update.update_norm, 1e-3, "update")
    equal(whole_state(sharded), alone.adapter.state_dict(), 2e-3, "weights")
    assert sharded.outer is not None and alone.outer is not None
    equal(sharded.outer.state_dict(), alone.outer.state_dict(), 2e-3, "average")
    for who in ("live", "base"):  # the reference is the sharded base
        ours, theirs = (e.score(batch, LogProbsWanted(), who) for e in (sharded, alone))  # type: ignore[arg-type]
        equal(ours, theirs, 1e-3, who)
    teacher = [e.outer.teach(e, batch, batch)[0] for e in (sharded, alone)]  # type: ignore[attr-defined]
    equal(vars(teacher[0]), vars(teacher[1]), 1e-3, "averaged policy")


def whole_state(sharded: LocalEngine) -> dict[str, torch.Tensor]:
    return {name: gathered(t) for name, t in sharded.adapter.state_dict().items()}


@check
def a_rank_holds_its_share_of_a_model_that_is_trained_whole() -> None:
    sharded, alone, batch = pair(**FULL)
    sharded.step(batch, GRPO())
    alone.step(batch, GRPO())

    def held(e: LocalEngine) -> int:
        moments = [t for entry in e.optimizer.state.values() for t in entry.values() if t.ndim]
        return held_bytes(e.policy.model) + sum(t.numel() * t.element_size() for t in moments)

    assert held(sharded) / held(alone) <= 1 / MESH.shard + 0.03, held(sharded) / held(alone)


@check
def a_model_that_is_trained_whole_is_sampled_and_saved_as_by_one_process() -> None:
    sharded, alone, batch = pair(**FULL, dtype=torch.float32)
    for e in (sharded, alone):
        e.step(batch, GRPO())
    ours, theirs = (e.sample([[5, 6, 7], [9, 4]], 2, SampleSpec(max_new_tokens=5, seed=4)) for e in (sharded, alone))
    assert [r.tokens for r in ours] == [r.tokens for r in theirs]
    folder = Path(MESH.from_first(tempfile.mkdtemp()))
    sharded.adapter.save(folder / f"{MESH.rank}")
    MESH.gathered(0)
    again = tiny_policy(torch.float32)
    read = en.load_adapter(again, folder / "0")
    equal(read.state_dict(), whole_state(sharded), 1e-5, "saved")  # base + offset is rounded once


@check
def a_sharded_checkpoint_continues_on_another_number_of_ranks() -> None:
    sharded, alone, batch = pair(**FULL)
    folder = Path(MESH.from_first(tempfile.mkdtemp()))
    sharded.step(batch, GRPO())
    sharded.save(folder / "mesh")
    assert len(list((folder / "mesh").glob("shard-*"))) >= MESH.shard
    alone.load(folder / "mesh")
    equal(whole_state(sharded), alone.adapter.state_dict(), 0.0)
    for e in (sharded, alone):
        e.step(batch, GRPO())
    equal(whole_state(sharded), alone.adapter.state_dict(), 1e-4, "the next step")
    if MESH.rank == 0:
        alone.save(folder / "one")
    MESH.gathered(0)
    sharded.load(folder / "one")
    equal(whole_state(sharded), alone.adapter.state_dict(), 1e-6)
    assert sharded.version == alone.version == 2
    moments = sharded.optimizer.state[sharded.parameters[0]]["exp_avg"]
    assert moments.shape == sharded.parameters[0].shape


def directions(adapter: en.Adapter) -> Directions:
    g = torch.Generator().manual_seed(5)
    basis = {}
    for name, p in adapter.named_parameters().items():
        count = min(2, p.numel())
        basis[name] = torch.linalg.qr(torch.randn(p.numel(), count, generator=g).double())[0].T.contiguous()
    return Directions(basis, {name: torch.ones(len(b), dtype=torch.float64) for name, b in basis.items()})


@check
def guards_and_averages_do_the_same() -> None:
    frozen = en.LoRA(rank=3, freeze_a=True)
    for kind in (Erase, Route):
        sharded, alone, batch = pair(frozen, guard=lambda a, k=kind: k(directions(a)), outer=EMATeacher)
        for _ in range(3):
            ours, theirs = (e.step(batch, GRPO()) for e in (sharded, alone))
            equal(dict(ours.update.guard), dict(theirs.update.guard), 1e-4, "guard")
        equal(sharded.adapter.state_dict(), alone.adapter.state_dict(), 1e-4)
        assert sharded.outer is not None and alone.outer is not None
        equal(sharded.outer.state_dict(), alone.outer.state_dict(), 1e-4, "average")


OLDER = "reduce_scatter_tensor"
"""What ``fully_shard`` calls in older versions of torch."""


def noting(name: str, dtypes: set[torch.dtype]) -> Callable[..., Any]:
    """Torch's exchange of this name, which notes the dtypes of the tensors that it sums."""
    plain = getattr(torch.distributed, name)

    def exchange(*args: Any, **kwargs: Any) -> Any:
        dtypes.update(t.dtype for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor))
        return plain(*args, **kwargs)

    return exchange


@check
def a_base_in_bfloat16_has_its_gradients_summed_in_float32() -> None:
    for settings in ({}, FULL):
        sharded, alone, batch = pair(**settings, dtype=torch.bfloat16)
        equal(sharded.gradients(batch, GRPO()), alone.gradients(batch, GRPO()), 5e-2, "gradient")
        batch = batch.to(sharded.policy.device)
        scatter = "reduce_scatter_single" if hasattr(torch.distributed, "reduce_scatter_single") else OLDER
        summed: dict[str, set[torch.dtype]] = {"all_reduce": set(), scatter: set()}
        with ExitStack() as stack:
            for name, dtypes in summed.items():
                stack.enter_context(mock.patch.object(torch.distributed, name, noting(name, dtypes)))
            own = sharded.own_gradients(batch, Objective.of(GRPO()))
        assert {g.dtype for g in own} == {torch.float32}
        assert summed[scatter if settings else "all_reduce"] == {torch.float32}, summed
        steps = [e.step(batch, GRPO()).update for e in (sharded, alone)]
        equal(steps[0].gradient_norm, steps[1].gradient_norm, 2e-2, "norm")


def steps_alike(sharded: LocalEngine, alone: LocalEngine, batch: Batch, count: int = 2) -> None:
    for _ in range(count):
        before = [t.clone() for t in alone.adapter.state_dict().values()]
        ours, theirs = (e.step(batch, GRPO()) for e in (sharded, alone))
        equal(ours.update.gradient_norm, theirs.update.gradient_norm, 1e-4, "norm")
        equal(ours.update.update_norm, theirs.update.update_norm, 1e-3, "update")
        equal(dict(ours.update.guard), dict(theirs.update.guard), 1e-3, "guard")
        found = zip(whole_state(sharded).items(), alone.adapter.state_dict().values(), before, strict=True)
        for (name, mine), other, old in found:  # relative to the length of the update
            assert float((mine - other).norm()) <= 1e-2 * float((other - old).norm()), name


def both_ways(sharded: LocalEngine, alone: LocalEngine, batch: Batch) -> None:
    """A checkpoint of the ranks continues in one process, and the one of one process on the ranks."""
    folder = Path(MESH.from_first(tempfile.mkdtemp()))
    sharded.save(folder / "mesh")
    alone.load(folder / "mesh")
    steps_alike(sharded, alone, batch, 1)
    if MESH.rank == 0:
        alone.save(folder / "one")
    MESH.gathered(0)
    sharded.load(folder / "one")
    steps_alike(sharded, alone, batch, 1)


@check
def guards_of_sharded_parameters_do_the_same() -> None:
    for kind, settings in ((Erase, {}), (Route, {"at": "gradient"}), (PerturbRoute, {"preserve": True})):
        sharded, alone, batch = pair(**FULL, guard=lambda a, k=kind, s=settings: k(directions(a), **s))
        steps_alike(sharded, alone, batch)
        both_ways(sharded, alone, batch)
        with sharded.guard.ablated(), alone.guard.ablated():  # type: ignore[union-attr]
            equal(whole_state(sharded), alone.adapter.state_dict(), 1e-3, "without the quarantine")


@check
def muon_orthogonalizes_whole_matrices() -> None:
    sharded, alone, batch = pair(**FULL, optimizer=Muon, lr=1e-3)
    steps_alike(sharded, alone, batch)
    both_ways(sharded, alone, batch)


@check
def an_offloaded_base_trains_as_in_one_process() -> None:
    """On a CPU nothing is copied; the policy reaches every part of the model, and torch's code for it runs."""
    from torch.distributed import fsdp

    given: list[Any] = []
    plain = fsdp.fully_shard

    def noted(module: Any, **settings: Any) -> Any:
        given.append(settings["offload_policy"])
        return plain(module, **settings)

    for variant, optimizer in ((en.LoRA(rank=3), AdamW), (en.Full(), AdamW), (en.Full(), Muon)):
        given.clear()
        with mock.patch.object(fsdp, "fully_shard", noted):
            sharded, alone, batch = pair(variant, size=0.02, optimizer=optimizer, lr=1e-3, offload=True)
        blocks = sharding.blocks_of(sharded.policy.body)
        assert len(given) == len(blocks) + 1 and {type(p) for p in given} == {fsdp.CPUOffloadPolicy}, given
        assert not any(p.pin_memory for p in given)  # there is no GPU that reads it
        equal(sharded.gradients(batch, GRPO()), alone.gradients(batch, GRPO()), 2e-5, "gradient")
        steps_alike(sharded, alone, batch)
        both_ways(sharded, alone, batch)
        assert not (found := failing(sharded, batch, quick=True)), found


@check
def spectral_norms_of_sharded_matrices_have_their_gradient() -> None:
    for variant in (en.Full(), en.DoRA(rank=2)):  # DoRA computes with the base's weight, which is sharded
        sharded, alone, batch = pair(variant, size=0.02)
        barrier = SpectralCap(cap=1e-3)
        equal(sharded.gradients(batch, barrier), alone.gradients(batch, barrier), 1e-4, "barrier")
        ours, theirs = (e.scalars(batch, [SpectralNorm()])[SpectralNorm()].values for e in (sharded, alone))
        equal(ours, theirs, 1e-4, "norms")


@check
def modules_that_are_trained_whole_beside_an_adapter() -> None:
    sharded, alone, batch = pair(modules_to_save=["embed_tokens", "o_proj"], outer=EMATeacher, optimizer=Muon, lr=1e-3)
    assert True in sharded.trained.sharded and False in sharded.trained.sharded
    equal(sharded.gradients(batch, GRPO()), alone.gradients(batch, GRPO()), 2e-5, "gradient")
    steps_alike(sharded, alone, batch)
    both_ways(sharded, alone, batch)
    assert sharded.outer is not None and alone.outer is not None
    equal(sharded.outer.state_dict(), alone.outer.state_dict(), 2e-3, "average")
    assert not (found := failing(sharded, batch, quick=True)), found
    folder = Path(MESH.from_first(tempfile.mkdtemp()))
    sharded.adapter.save(folder / f"{MESH.rank}")
    MESH.gathered(0)
    equal(en.load_adapter(tiny_policy(torch.float64), folder / "0").state_dict(), whole_state(sharded), 0.0, "saved")


@check
def scores_and_samples_are_those_of_one_process() -> None:
    sharded, alone, batch = pair()
    ids = batch.token_target[:, None]
    for who in ("live", "base"):
        for want in (LogProbsWanted(), HiddenWanted(), TopKWanted(5), AtIdsWanted(ids), LogitsWanted()):
            ours, theirs = (e.score(batch, want, who) for e in (sharded, alone))  # type: ignore[arg-type]
            parts = [vars(x) if not isinstance(x, torch.Tensor) else {"x": x} for x in (ours, theirs)]
            equal(*parts, 1e-9, f"{who} {want}")  # type: ignore[misc]
    prompts = [[5, 6, 7], [9, 4], [5, 6, 7], [11]]
    narrow = [engine(mesh, dtype=torch.float32) for mesh in (MESH, None)]
    ours, theirs = (e.sample(prompts, 3, SampleSpec(max_new_tokens=6, seed=4)) for e in narrow)
    assert [(r.prompt_index, r.sample_index, r.tokens) for r in ours] == [
        (r.prompt_index, r.sample_index, r.tokens) for r in theirs
    ]


@check
def a_rank_without_rows_and_uneven_micro_batches() -> None:
    sharded, alone, batch = pair(micro_tokens=12)
    one = batch.rows([3])
    equal(sharded.gradients(one, GRPO()), alone.gradients(one, GRPO()), what="one row")
    equal(sharded.gradients(batch, GRPO()), alone.gradients(batch, GRPO()), what="many parts")


@check
def a_rank_holds_its_share_of_the_base() -> None:
    sharded, alone, batch = pair()
    own = sum(p.numel() * p.element_size() for p in sharded.parameters)
    base = held_bytes(alone.policy.model) - own
    for act in (lambda: None, lambda: sharded.step(batch, GRPO()), lambda: sharded.score(batch, LogProbsWanted())):
        act()
        share = (held_bytes(sharded.policy.model) - own) / base
        assert share <= 1 / MESH.shard + 0.02, share


@check
def a_checkpoint_continues_on_another_number_of_ranks() -> None:
    sharded, alone, batch = pair()
    folder = Path(MESH.from_first(tempfile.mkdtemp()))
    sharded.step(batch, GRPO())
    sharded.save(folder / "two")
    MESH.gathered(0)  # rank 0 has written it
    alone.load(folder / "two")
    equal(alone.adapter.state_dict(), sharded.adapter.state_dict(), 0.0)
    if MESH.rank == 0:
        alone.step(batch, GRPO())
        alone.save(folder / "one")
    else:
        alone.step(batch, GRPO())
    MESH.gathered(0)
    sharded.load(folder / "one")
    equal(sharded.adapter.state_dict(), alone.adapter.state_dict(), 0.0)
    assert sharded.version == alone.version == 2


def failing(sharded: LocalEngine, batch: Batch, quick: bool = False) -> set[str]:
    verdict = en.prove(sharded, GRPO(clip=0.2) + 0.5 * en.SFT(), batch, quick=quick)
    return {f"{f.law} {f.subject}" for f in verdict.findings if f.outcome == "fails"}


@check
def prove_holds_on_the_mesh() -> None:
    sharded, _, batch = pair()
    assert not (found := failing(sharded, batch)), found


@check
def prove_finds_planted_mistakes() -> None:
    def unreduced(self: Mesh, parameters: Any) -> None:
        """Gradients stay on their rank."""

    original = Mesh.sum_gradients

    def mean(self: Mesh, parameters: Any) -> None:
        original(self, parameters)
        for p in parameters:
            p.grad = None if p.grad is None else p.grad / self.size

    def clipped_per_rank(self: Mesh, parameters: Any) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1e-3)
        original(self, parameters)

    def same_rows(self: Mesh, units: Any, sizes: Any) -> list[int]:
        return sorted(r for unit in units for r in unit)

    same = mock.patch.object(Mesh, "require_same", return_value=None)  # the mesh's own check would end the step first
    for law, change in (
        ("SH the gradient of the ranks", mock.patch.object(Mesh, "sum_gradients", unreduced)),
        ("SH the gradient of the ranks", mock.patch.object(Mesh, "sum_gradients", mean)),
        ("SH the gradient of the ranks", mock.patch.object(Mesh, "sum_gradients", clipped_per_rank)),
        ("SH the rows of the ranks", mock.patch.object(Mesh, "deal", same_rows)),
        ("SH the ranks' random numbers", mock.patch.object(Mesh, "own_random", nullcontext)),
    ):
        sharded, _, batch = pair()
        with same, change:
            assert law in (found := failing(sharded, batch, quick=True)), (law, found)
    sharded, _, batch = pair()
    sharded.trained.sharded = [True] * len(sharded.parameters)  # taken for sharded: nobody sums their gradients
    with same:
        assert "SH the gradient of the ranks" in (found := failing(sharded, batch, quick=True)), found
    sharded, _, batch = pair()
    sharded.optimizer.param_groups[0]["params"] = sharded.optimizer.param_groups[0]["params"][1:]
    assert any("GL" in f for f in failing(sharded, batch)), "a parameter that the optimizer does not own"


def prove_finds_planted_mistakes_in_full_parameter_training() -> None:
    sharded, _, batch = pair(**FULL)
    assert not (found := failing(sharded, batch)), found
    original = sharding.sum_over_ranks
    with mock.patch.object(local, "sum_over_ranks", lambda model, divided_by=1: original(model, MESH.size)):
        local.sum_over_ranks(sharded.policy.model)  # the mean, which is torch's default
        assert "SH the gradient of the ranks" in failing(sharded, batch)
    original(sharded.policy.model)

    def per_rank(self: Any, bound: float) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self.parameters, bound))

    with mock.patch.object(Trained, "clip", per_rank):
        assert "SH the clipped norm" in failing(sharded, batch)
    with mock.patch.object(Mesh, "deal", lambda self, units, sizes: sorted(r for unit in units for r in unit)):
        assert "SH the gradient of the ranks" in failing(sharded, batch)
    sharded.optimizer.param_groups[0]["params"] = sharded.optimizer.param_groups[0]["params"][1:]
    found = failing(sharded, batch)
    assert {"SH the optimizer's parameters", f"SH {len(sharded.parameters)} trainable parameters"} <= found, found


SLOW["prove_finds_planted_mistakes_in_full_parameter_training"] = (
    prove_finds_planted_mistakes_in_full_parameter_training
)


def every_adapter_with_a_guard() -> None:
    """Slow: every guard on every adapter that guards accept."""
    tested = set()
    for name, (kind, settings) in sorted(SUBJECTS.items()):
        variant = VARIANTS[kind](**settings)
        if not variant.linear() or kind == "full":
            continue
        for guard in (Erase, Route):
            try:
                sharded, alone, batch = pair(variant, guard=lambda a, g=guard: g(directions(a)))
            except AdapterError:
                continue
            for _ in range(3):
                ours, theirs = (e.step(batch, GRPO()) for e in (sharded, alone))
                equal(dict(ours.update.guard), dict(theirs.update.guard), 1e-3, f"{name} guard")
            equal(sharded.adapter.state_dict(), alone.adapter.state_dict(), 1e-3, name)
            tested.add((kind, guard))
    assert {kind for kind, _ in tested} >= {"lora", "vera", "ia3", "antipasto"}, tested


SLOW["every_adapter_with_a_guard"] = every_adapter_with_a_guard


class FilesOnly:
    """A sampler elsewhere that has only the files of a push."""

    place, plain = "elsewhere", True

    def push(self, weights: Weights) -> None:
        policy = tiny_policy(torch.float32)
        with tempfile.TemporaryDirectory() as folder:
            for name, content in weights.files(plain=True).items():
                (Path(folder) / name).write_bytes(content)
            if weights.whole:
                model = type(policy.model).from_pretrained(folder, dtype=torch.float32)
                policy = Policy.of(model, policy.tokenizer)
            self.engine = LocalEngine(
                policy, en.attach(policy, en.LoRA(rank=1)) if weights.whole else load_adapter(policy, folder)
            )
        self.engine.version = weights.version

    def score(self, rows: Any) -> list[float]:
        return logprobs(self.engine, rows_batch(rows, 0)).tolist()

    def sample(self, prompts: Any, n: int, spec: SampleSpec) -> list[Rollout]:
        return self.engine.sample(prompts, n, spec)

    def restart(self) -> None: ...

    def close(self) -> None: ...


@check
def weights_in_shards_reach_a_sampler_elsewhere() -> None:
    """The first rank pushes, probes and samples; every rank gets the rollouts, and the same error."""
    given: list[dict[str, Any]] = [{}, FULL, {"modules_to_save": ["embed_tokens"]}]
    for how in given:
        ours, member = engine(MESH, dtype=torch.float32, **how), FilesOnly()
        pool = SamplerPool(ours, [[3, 4, 5, 6]], [member] if MESH.rank == 0 else [])
        for version in range(2):
            found = pool.sample([[3, 4, 5], [6, 7]], 2, SampleSpec(max_new_tokens=4, temperature=0.7))
            assert [r.policy_version for r in found] == [version] * 4 and MESH.from_first(found) == found
            metrics = MESH.from_first(pool.metrics)
            assert metrics["sampler/probe"] < 1e-5 and (version == 0 or metrics["sampler/moved"] > 1e-4), metrics
            ours.step(every_signal(ours), GRPO())
        if MESH.rank == 0:
            member.push = lambda weights: None  # type: ignore[method-assign]
        with pytest.raises(EarnestError, match="elsewhere still runs old weights"):
            pool.sample([[3, 4, 5]], 1, SampleSpec(max_new_tokens=2))


# --- layers that ranks share (engine.tensor) --------------------------------------------------------------------------

TENSOR: dict[str, Callable[[], None]] = {}
TENSOR_FEW = (
    "adapters_of_factors_have_the_gradient_of_one_process_and_others_are_refused",
    "a_rank_holds_its_part_of_every_layer",
    "a_rank_without_rows_and_uneven_micro_batches",
    "prove_finds_planted_mistakes_in_split_layers",
)
"""The checks of split layers that run with those of shards, in the same processes."""


def tensor_check(function: Callable[[], None]) -> Callable[[], None]:
    TENSOR[function.__name__] = function
    return function


ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@tensor_check
def adapters_of_factors_have_the_gradient_of_one_process_and_others_are_refused() -> None:
    tested: set[str] = set()
    refused: set[tuple[str, bool]] = set()
    for name, (kind, settings) in sorted(SUBJECTS.items()):
        if kind in tested | {k for k, _ in refused} and not LONG:
            continue
        variant = VARIANTS[kind](**settings)
        try:
            alone = engine(None, variant, targets=ALL)
        except AdapterError:  # a rank above this model's, or one that is calibrated on data
            continue
        try:
            sharded = engine(MESH, variant, targets=ALL)
        except (ConfigError, AdapterError) as error:
            refused.add((kind, "set engine.tensor=1" in str(error)))
            continue
        batch = every_signal(alone)
        equal(sharded.gradients(batch, GRPO()), alone.gradients(batch, GRPO()), 1e-4, name)
        assert "split over 2 ranks, head by rows" in sharded.step(batch, GRPO()).layout
        tested.add(kind)
    assert tested >= {"lora", "pissa", "vera", "delora", "antipasto"}, tested
    assert refused >= {(k, True) for k in ("full", "dora", "ia3", "oft", "road", "hra")}, refused
    assert not tested & {kind for kind, _ in refused} and all(well for _, well in refused), refused


@tensor_check
def a_rank_holds_its_part_of_every_layer() -> None:
    sharded, alone, batch = pair()
    for act in (lambda: None, lambda: sharded.step(batch, GRPO())):
        act()
        held = [sum(held_bytes(b) for b in sharding.blocks_of(e.policy.body)) for e in (sharded, alone)]
        own = sum(p.numel() * p.element_size() for p in alone.parameters)
        norms = sum(p.numel() * 8 for n, p in alone.policy.body.layers.named_parameters() if "norm" in n)  # type: ignore[operator, union-attr]
        share = (held[0] - own) / (held[1] - own - norms)
        assert share <= 1 / (MESH.shard * MESH.tensor) + norms / held[1] + 0.02, share


@tensor_check
def an_averaged_teacher_scores_as_in_one_process() -> None:
    sharded, alone, batch = pair(outer=EMATeacher, targets=ALL)
    found = []
    for e in (sharded, alone):
        e.step(batch, GRPO())
        found.append(e.outer.teach(e, batch, batch)[0])  # type: ignore[union-attr]
    equal(vars(found[0]), vars(found[1]), 1e-4, "averaged policy")


@tensor_check
def prove_finds_planted_mistakes_in_split_layers() -> None:
    original = Mesh.sum_gradients

    def mean(self: Mesh, parameters: Any) -> None:
        original(self, parameters)
        for p in parameters:
            p.grad = None if p.grad is None else p.grad / self.tensor

    def first_part(self: Any, weight: torch.Tensor) -> torch.Tensor:
        """Every rank computes with the first part of the factors."""
        dim = 0 if self.cut == "columns" else 1
        return weight.narrow(dim, 0, weight.shape[dim] // self.team.count)

    def unsummed(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None

    def twice(ctx: Any, *gradients: Any) -> Any:
        return MESH.tensor * gradients[0], None

    same = mock.patch.object(Mesh, "require_same", return_value=None)
    for change in (
        mock.patch.object(Mesh, "sum_gradients", return_value=None),
        mock.patch.object(Mesh, "sum_gradients", mean),
        mock.patch.object(split.Split, "part", first_part),
        mock.patch.object(split._SummedGradient, "backward", staticmethod(unsummed)),
        mock.patch.object(split._Sum, "backward", staticmethod(twice)),
        mock.patch.object(split._Sum, "forward", staticmethod(lambda ctx, y, team: y.clone())),
    ):
        sharded, _, batch = pair()
        with same, change:
            assert "SH the gradient of the ranks" in (found := failing(sharded, batch, quick=True)), (change, found)


@check
def ranks_that_differ_are_found() -> None:
    sharded, _, batch = pair()
    if MESH.rank == 1:
        assert batch.advantages is not None
        batch = batch.with_signals(advantages=batch.advantages + 0.5)  # a grader with another opinion
    with pytest.raises(EarnestError, match=f"batches differ between the {MESH.size} ranks"):
        sharded.step(batch, GRPO())


for shared in (
    "every_term_has_the_gradient_of_one_process",
    "a_step_reports_what_one_process_reports_and_many_steps_stay_together",
    "guards_and_averages_do_the_same",
    "scores_and_samples_are_those_of_one_process",
    "a_rank_without_rows_and_uneven_micro_batches",
    "a_checkpoint_continues_on_another_number_of_ranks",
    "prove_holds_on_the_mesh",
    "ranks_that_differ_are_found",
):
    TENSOR[shared] = CHECKS[shared]


def main(out: Path, wanted: list[str]) -> None:
    global MESH
    torch.set_num_threads(1)
    meshes.PATIENCE = timedelta(seconds=60)
    copies, tensor = (int(os.environ.get(name, "1")) for name in ("REPLICATE", "TENSOR"))
    shard = int(os.environ["WORLD_SIZE"]) // (copies * tensor)
    MESH = Mesh.start(shard=shard, replicate=copies, tensor=tensor)
    results: dict[str, str] = {}
    _run(out, results, {n: f for n, f in (CHECKS | SLOW | TENSOR).items() if n in (wanted or CHECKS)})
    if not wanted and MESH.size == 2 and set(results.values()) == {"holds"}:
        MESH = Mesh.start(tensor=2)  # the same two processes as a team
        _run(out, results, {f"split layers: {n}": TENSOR[n] for n in TENSOR_FEW})
    meshes.end()


def _run(out: Path, results: dict[str, str], checks: dict[str, Callable[[], None]]) -> None:
    for name, function in checks.items():
        try:
            function()
            results[name] = "holds"
        except Exception:
            results[name] = traceback.format_exc()
        (out / f"rank-{MESH.rank}.json").write_text(json.dumps(results))
        if any(r != "holds" for r in MESH.gathered(results[name])):
            break  # the ranks may no longer be at the same place


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
