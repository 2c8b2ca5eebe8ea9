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
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import earnest as en
from earnest.adapters.cases import SUBJECTS
from earnest.adapters.errors import AdapterError
from earnest.adapters.variant import VARIANTS
from earnest.engines import AdamW, AtIdsWanted, HiddenWanted, LocalEngine, LogitsWanted, LogProbsWanted, TopKWanted
from earnest.engines import mesh as meshes
from earnest.engines.mesh import Mesh
from earnest.engines.sharding import held_bytes
from earnest.errors import EarnestError
from earnest.guards import Directions, Erase, Route
from earnest.models.sampling import SampleSpec
from earnest.objectives import GRPO
from earnest.signals import Batch, EMATeacher
from tests.engines.cases import every_signal
from tests.engines.conftest import perturb, tiny_policy
from tests.engines.test_local import RootMeanSquare
from tests.objectives.support import examples

TARGETS = ("q_proj", "v_proj", "down_proj")
CHECKS: dict[str, Callable[[], None]] = {}
MESH = Mesh()


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def engine(mesh: Mesh | None, variant: Any = None, **settings: Any) -> LocalEngine:
    policy = tiny_policy(settings.pop("dtype", torch.float64))
    adapter = en.attach(policy, variant or en.LoRA(rank=3), targets=TARGETS, seed=0)
    perturb(adapter, size=0.1)
    if "guard" in settings:
        settings["guard"] = settings["guard"](adapter)
    if "outer" in settings:
        settings["outer"] = settings["outer"](adapter)
    settings.setdefault("micro_tokens", 40)
    return LocalEngine(policy, adapter, AdamW(lr=settings.pop("lr", 1e-2)), mesh=mesh, **settings)


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
    tested = set()
    for name, (kind, settings) in sorted(SUBJECTS.items()):
        if kind == "full":  # refused: test_sharded
            continue
        try:
            sharded, alone, batch = pair(VARIANTS[kind](**settings))
        except AdapterError:  # a rank above this model's, or one that is calibrated on data
            continue
        equal(sharded.gradients(batch, GRPO()), alone.gradients(batch, GRPO()), 1e-4, name)
        tested.add(kind)
    assert {k for k in VARIANTS if k != "full" and not VARIANTS[k]().wants_calibration()} <= tested, tested


@check
def a_step_reports_what_one_process_reports_and_50_steps_stay_together() -> None:
    sharded, alone, batch = pair(max_grad_norm=0.05, lr=1e-3)
    objective = GRPO(clip=0.2) + 0.1 * en.SFT() + 0.1 * en.DPO()
    for number in range(50):
        ours, theirs = (e.step(batch, objective, shares=number == 0) for e in (sharded, alone))
        assert theirs.update.clip_factor < 1
        equal(ours.loss, theirs.loss, 1e-3, "loss")
        equal(ours.update.gradient_norm, theirs.update.gradient_norm, 1e-3, "norm")
        equal(ours.update.update_norm, theirs.update.update_norm, 1e-3, "update")
        for label, term in theirs.terms.items():
            equal(dict(ours.terms[label].metrics), dict(term.metrics), 1e-3, label)
    equal(sharded.adapter.state_dict(), alone.adapter.state_dict(), 2e-3, "weights")
    assert sharded.policy.fingerprint() == alone.policy.fingerprint()


@check
def guards_and_averages_do_the_same() -> None:
    def directions(adapter: en.Adapter) -> Directions:
        g = torch.Generator().manual_seed(5)
        basis = {}
        for name, p in adapter.named_parameters().items():
            basis[name] = torch.linalg.qr(torch.randn(p.numel(), 2, generator=g).double())[0].T.contiguous()
        return Directions(basis, {name: torch.ones(2, dtype=torch.float64) for name in basis})

    frozen = en.LoRA(rank=3, freeze_a=True)
    for kind in (Erase, Route):
        sharded, alone, batch = pair(frozen, guard=lambda a, k=kind: k(directions(a)), outer=EMATeacher)
        for _ in range(3):
            ours, theirs = (e.step(batch, GRPO()) for e in (sharded, alone))
            equal(dict(ours.update.guard), dict(theirs.update.guard), 1e-4, "guard")
        equal(sharded.adapter.state_dict(), alone.adapter.state_dict(), 1e-4)
        assert sharded.outer is not None and alone.outer is not None
        equal(sharded.outer.state_dict(), alone.outer.state_dict(), 1e-4, "average")


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
        assert share <= 1 / MESH.size + 0.02, share


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


def failing(sharded: LocalEngine, batch: Batch) -> set[str]:
    verdict = en.prove(sharded, GRPO(clip=0.2) + 0.5 * en.SFT(), batch)
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
    for name, change in (
        ("not reduced", mock.patch.object(Mesh, "sum_gradients", unreduced)),
        ("mean instead of sum", mock.patch.object(Mesh, "sum_gradients", mean)),
        ("clip per rank", mock.patch.object(Mesh, "sum_gradients", clipped_per_rank)),
        ("same rows on every rank", mock.patch.object(Mesh, "deal", same_rows)),
    ):
        sharded, _, batch = pair()
        with same, change:
            assert failing(sharded, batch), name
    sharded, _, batch = pair()
    sharded.optimizer.param_groups[0]["params"] = sharded.optimizer.param_groups[0]["params"][1:]
    assert any("GL" in f for f in failing(sharded, batch)), "a parameter that the optimizer does not own"


@check
def ranks_that_differ_are_found() -> None:
    sharded, _, batch = pair()
    if MESH.rank == 1:
        assert batch.advantages is not None
        batch = batch.with_signals(advantages=batch.advantages + 0.5)  # a grader with another opinion
    with pytest.raises(EarnestError, match="batches differ between the 2 ranks"):
        sharded.step(batch, GRPO())


def main(out: Path, wanted: list[str]) -> None:
    global MESH
    torch.set_num_threads(1)
    meshes.PATIENCE = timedelta(seconds=60)
    MESH = Mesh.start(shard=int(os.environ["WORLD_SIZE"]))
    results = {}
    for name, function in CHECKS.items():
        if wanted and name not in wanted:
            continue
        try:
            function()
            results[name] = "holds"
        except Exception:
            results[name] = traceback.format_exc()
        (out / f"rank-{MESH.rank}.json").write_text(json.dumps(results))
        if any(r != "holds" for r in MESH.gathered(results[name])):
            break  # the ranks may no longer be at the same place
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
