"""The laws of a guarded step: Route equals the unguarded run; Erase at the update has no leak, at the gradient it
has."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

import earnest as en
from earnest.errors import CheckpointError
from earnest.guards import Directions, Erase, GuardError, Perturb, Route
from earnest.guards.gates import GATES
from earnest.signals.batch import Batch
from tests.guards.conftest import Make

LOSS = en.GRPO(clip=0.5)
HARD = {"optimizer": en.AdamW(lr=0.02, weight_decay=0.1), "max_grad_norm": 1e-3}


def values(engine: en.LocalEngine) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in zip(engine.names, engine.parameters, strict=True)}


def descent(directions: Directions, before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    """Coordinates of -u along every direction, in float64."""
    u = {n: (after[n].double() - before[n].double()).flatten() for n in directions.basis}
    return {n: -(V.double() @ u[n]) for n, V in directions.basis.items()}


def test_route_is_the_unguarded_run_bit_for_bit(make: Make, directions: Directions, batches: list[Batch]) -> None:
    """50 AdamW steps with clipping and decay: parameters and both moments. The quarantine is not empty meanwhile."""
    guard = Route(directions)
    free, routed = make(**HARD), make(guard, **HARD)
    for batch in batches:
        a, b = free.step(batch, LOSS), routed.step(batch, LOSS)
        assert a.loss == b.loss and a.update.clip_factor == b.update.clip_factor < 1
    for p, q in zip(free.parameters, routed.parameters, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(free.optimizer.state[p]["exp_avg"], routed.optimizer.state[q]["exp_avg"])
        assert torch.equal(free.optimizer.state[p]["exp_avg_sq"], routed.optimizer.state[q]["exp_avg_sq"])
    assert b.update.guard["quarantine"] > 0.01
    total = values(routed)
    with guard.ablated():
        main = values(routed)
    assert all(torch.equal(total[n], v) for n, v in values(routed).items()), "the total comes back to the bit"
    assert any(not torch.equal(total[n], main[n]) for n in total)


@pytest.mark.parametrize("gate", GATES)
def test_the_components_of_an_erased_update(
    make: Make, directions: Directions, batches: list[Batch], gate: str
) -> None:
    """two_sided: no component at all. one_sided: none of the gated sign, the others unchanged. reverse: the opposite
    sign."""
    free, guarded = make(**HARD), make(Erase(directions, gate=gate), **HARD)
    before = values(free)
    free.step(batches[0], LOSS)
    report = guarded.step(batches[0], LOSS)
    left, was = (descent(directions, before, values(e)) for e in (guarded, free))
    for name in directions.basis:
        tolerance = 1e-5 * float(was[name].abs().max())
        if gate == "two_sided":
            assert float(left[name].abs().max()) < tolerance
        elif gate == "one_sided":
            assert float(left[name].max()) < tolerance
            torch.testing.assert_close(left[name].clamp_max(0), was[name].clamp_max(0), rtol=0, atol=tolerance)
        else:
            torch.testing.assert_close(left[name], -was[name], rtol=0, atol=tolerance)
    assert any(float(c.max()) > 0 for c in was.values()), "there was something to take out"
    if gate != "reverse":
        assert report.update.guard["leak_update"] < 1e-6 < report.update.guard["leak_gradient"]


def test_overshoot_turns_the_component(make: Make, directions: Directions, batches: list[Batch]) -> None:
    free, guarded = make(), make(Erase(directions, gate="two_sided", overshoot=1.5))
    before = values(free)
    free.step(batches[0], LOSS)
    guarded.step(batches[0], LOSS)
    left, was = (descent(directions, before, values(e)) for e in (guarded, free))
    for name in was:
        torch.testing.assert_close(left[name], -0.5 * was[name], rtol=1e-4, atol=1e-7)


def test_preserve_keeps_the_length(make: Make, directions: Directions, batches: list[Batch]) -> None:
    free, guarded = make(), make(Erase(directions, preserve=True))
    free.step(batches[0], LOSS)
    guarded.step(batches[0], LOSS)
    for name, value in values(guarded).items():
        assert float(value.norm()) == pytest.approx(float(values(free)[name].norm()), rel=1e-5)


def test_the_gradient_variant_leaks_and_the_update_variant_does_not(
    make: Make, directions: Directions, batches: list[Batch]
) -> None:
    """AdamW divides by √v coordinate by coordinate: a gradient without the component gives a step with it."""
    leaks: dict[tuple[str, str], list[float]] = {}
    for at, kind in itertools.product(("update", "gradient"), (Erase, Route)):
        engine = make(kind(directions, gate="two_sided", at=at), **HARD)
        for batch in batches[:10]:
            found = engine.step(batch, LOSS).update.guard
            leaks.setdefault((at, "leak_gradient"), []).append(found["leak_gradient"])
            leaks.setdefault((at, "leak_update"), []).append(found["leak_update"])
    assert max(leaks["update", "leak_update"]) < 1e-6
    assert min(leaks["gradient", "leak_update"]) > 0.05
    assert max(leaks["gradient", "leak_gradient"]) < 1e-6
    assert min(leaks["update", "leak_gradient"]) > 0.05


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kind", [Erase, Route])
def test_under_plain_sgd_gradient_and_update_agree(
    make: Make, directions: Directions, batches: list[Batch], gate: str, kind: type[Route]
) -> None:
    settings = {"optimizer": en.SGD(lr=5.0), "max_grad_norm": 0.02}
    guards = [kind(directions, gate=gate, at=at) for at in ("gradient", "update")]
    engines = [make(guard, **settings) for guard in guards]
    for batch in batches[:5]:
        for engine in engines:
            engine.step(batch, LOSS)
    mains = []
    for guard, engine in zip(guards, engines, strict=True):
        with guard.ablated():
            mains.append(values(engine))
    for name in mains[0]:
        torch.testing.assert_close(mains[0][name], mains[1][name], rtol=1e-4, atol=1e-6)


def test_ablated_route_is_erase_given_the_same_gradients(
    make: Make, directions: Directions, batches: list[Batch]
) -> None:
    """50 clipped AdamW steps, with the same given gradients, because the two policies differ and would have other
    gradients.

    Without decay, which reads θ: it pulls Route's total and Erase's parameters by different amounts."""
    route, erase = Route(directions), Erase(directions)
    settings = {"optimizer": en.AdamW(lr=0.02), "max_grad_norm": 1.0}
    routed, erased = make(route, **settings), make(erase, **settings)
    for number in range(50):
        rng = torch.Generator().manual_seed(number)
        for engine in (routed, erased):
            rng.manual_seed(number)
            for p in engine.parameters:
                p.grad = torch.randn(p.shape, generator=rng)
            assert engine.update().clip_factor < 1
    with route.ablated():
        main = values(routed)
    for name, value in values(erased).items():
        torch.testing.assert_close(main[name], value, rtol=1e-5, atol=3e-6)
    assert any(not torch.allclose(values(routed)[n], main[n], atol=1e-3) for n in directions.basis)


def test_what_is_removed_lies_in_the_span(make: Make, directions: Directions, batches: list[Batch]) -> None:
    guard = Route(directions)
    engine = make(guard, **HARD)
    for batch in batches[:5]:
        engine.step(batch, LOSS)
    for name, V in directions.basis.items():
        q = guard.quarantine[name].double().flatten()
        outside = q - (q @ V.double().t()) @ V.double()
        assert float(outside.norm()) < 1e-5 * max(float(q.norm()), 1e-6)


def test_the_order_of_modules_does_not_matter(make: Make, directions: Directions, batches: list[Batch]) -> None:
    engines = [make(Erase(directions)), make(Erase(directions))]
    second = engines[1]
    order = [2, 0, 3, 1]
    second.names = [second.names[i] for i in order]
    second.parameters = [second.parameters[i] for i in order]
    reports = [e.step(batches[0], LOSS).update.guard for e in engines]
    assert reports[0] == pytest.approx(reports[1])
    first, other = (values(e) for e in engines)
    assert all(torch.equal(first[n], other[n]) for n in first)


def test_on_a_bf16_model(make: Make, directions: Directions, batches: list[Batch]) -> None:
    """The adapter is in fp32 there too: Route equals the unguarded run, Erase has no leak."""
    free, routed = make(dtype="bfloat16", **HARD), make(Route(directions), dtype="bfloat16", **HARD)
    erased = make(Erase(directions, gate="two_sided"), dtype="bfloat16", **HARD)
    for batch in batches[:5]:
        free.step(batch, LOSS)
        routed.step(batch, LOSS)
        assert erased.step(batch, LOSS).update.guard["leak_update"] < 1e-6
    assert all(torch.equal(p, q) for p, q in zip(free.parameters, routed.parameters, strict=True))


def test_bf16_parameters_lose_a_rounding_only(directions: Directions, make: Make) -> None:
    """For parameters in 16 bits (another trainer's): the arithmetic is in float64 and rounds once, on writing."""
    guard = Erase(directions, gate="two_sided")
    make(guard)
    rng = torch.Generator().manual_seed(0)
    names = list(directions.basis)
    before = [torch.randn(V.shape[1], generator=rng).bfloat16() for V in directions.basis.values()]
    after = [torch.nn.Parameter((b.float() + 0.1 * torch.randn(b.shape, generator=rng)).bfloat16()) for b in before]
    guard.judge(names, before, after)
    for V, b, p in zip(directions.basis.values(), before, after, strict=True):
        left = V.double() @ (p.detach().double() - b.double())
        assert float(left.abs().max()) < 2 * 2**-8 * float(b.float().abs().max())


@pytest.mark.parametrize(("kind", "at"), list(itertools.product([Erase, Route], ["update", "gradient"])))
def test_resuming_is_exact(
    make: Make, directions: Directions, batches: list[Batch], tmp_path: Path, kind: type[Route], at: str
) -> None:
    whole, first, second = (make(kind(directions, at=at), **HARD) for _ in range(3))
    for batch in batches[:6]:
        whole.step(batch, LOSS)
    for batch in batches[:3]:
        first.step(batch, LOSS)
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    for batch in batches[3:6]:
        second.step(batch, LOSS)
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters, second.parameters, strict=True))
    ours, theirs = whole.guard, second.guard
    assert ours is not None and theirs is not None
    mine, other = ours.state_dict(), theirs.state_dict()
    assert sorted(mine) == sorted(other) and all(torch.equal(mine[k], other[k]) for k in mine)


def test_a_state_of_another_guard_is_refused(make: Make, directions: Directions, tmp_path: Path) -> None:
    make(Route(directions)).save(tmp_path / "state")
    with pytest.raises(CheckpointError, match="state of a guard"):
        make().load(tmp_path / "state")
    with pytest.raises(GuardError, match="not a guard's state"):
        make(Route(directions)).guard.load_state_dict({})


def test_noise_is_as_long_as_what_erase_removes(make: Make, directions: Directions, batches: list[Batch]) -> None:
    noisy, erased, free = make(Perturb(directions, seed=3)), make(Erase(directions)), make()
    reports = [e.step(batches[0], LOSS).update.guard for e in (noisy, erased)]
    assert reports[0]["removed"] == pytest.approx(reports[1]["removed"]) and reports[0]["removed"] > 0
    free.step(batches[0], LOSS)
    for name in directions.basis:
        lengths = [float((values(e)[name] - values(free)[name]).norm()) for e in (noisy, erased)]
        assert lengths[0] == pytest.approx(lengths[1], rel=1e-3, abs=1e-7)


def test_noise_has_the_settings_of_the_guard_that_it_replaces(
    make: Make, directions: Directions, batches: list[Batch]
) -> None:
    for settings in ({"gate": "two_sided"}, {"gate": "two_sided", "overshoot": 2.0}):
        pair = [make(Perturb(directions, **settings)), make(Erase(directions, **settings))]
        removed = [e.step(batches[0], LOSS).update.guard["removed"] for e in pair]
        assert removed[0] == pytest.approx(removed[1])
    assert removed[0] > 1.5 * make(Perturb(directions)).step(batches[0], LOSS).update.guard["removed"]
    with pytest.raises(GuardError, match="the length of the part removed from an update"):
        Perturb(directions, at="gradient")


def test_nothing_trains_inside_ablated(make: Make, directions: Directions, batches: list[Batch]) -> None:
    guard = Route(directions)
    engine = make(guard)
    engine.step(batches[0], LOSS)
    with guard.ablated(), pytest.raises(GuardError, match="not the trained ones"):
        engine.step(batches[1], LOSS)


def test_the_laws_of_the_audit_hold_on_guarded_engines(
    make: Make, directions: Directions, batches: list[Batch]
) -> None:
    for guard in (Route(directions), Erase(directions), Route(directions, at="gradient")):
        engine = make(guard)
        engine.step(batches[0], LOSS)
        held, state = values(engine), guard.state_dict()
        verdict = en.prove(engine, LOSS, batches[1], quick=guard.at == "gradient" or isinstance(guard, Erase))
        verdict.raise_if_failed()
        assert any(f.subject.startswith("guard") and f.outcome == "holds" for f in verdict.findings)
        assert all(torch.equal(held[n], v) for n, v in values(engine).items())
        assert all(torch.equal(state[k], v) for k, v in guard.state_dict().items()), "the proof leaves no trace"


def test_a_guard_that_removes_nothing_is_reported(make: Make, batches: list[Batch]) -> None:
    """One direction per module, the negative of the step itself: a one-sided gate removes nothing."""
    free = make(optimizer=en.SGD(lr=1e-3))
    before = values(free)
    free.step(batches[0], LOSS)
    steps = {n: (values(free)[n] - before[n]).flatten() for n in before}
    wrong = Directions({n: (u / u.norm())[None] for n, u in steps.items()}, {n: torch.ones(1) for n in steps})
    verdict = en.prove(make(Erase(wrong), optimizer=en.SGD(lr=1e-3)), LOSS, batches[0], quick=True)
    assert [f.outcome for f in verdict.findings if f.subject == "guard Erase"] == ["fails"], verdict.findings
