"""Directions: planted ones are found with the sign of most pairs, noise is dropped, files are exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import earnest as en
from earnest.engines import LogProbsWanted
from earnest.guards import (
    Directions,
    Erase,
    GuardError,
    GuardWarning,
    Route,
    Triple,
    assemble,
    directions_from_activations,
    directions_from_gradients,
    random_directions,
    read_triples,
    shuffled_directions,
)
from earnest.guards.gates import GATES, Rule
from earnest.models.replies import reply_tokens
from earnest.signals.batch import Batch
from tests.guards.conftest import Make, triples


def test_by_hand() -> None:
    """w = (3, -4, 12), V = {e1, e2}: the coordinates are 3 and -4.

    one_sided takes (3, 0, 0); two_sided (3, -4, 0); reverse (6, -8, 0). Kept length under preserve: 13.
    """
    w, V = torch.tensor([3.0, -4.0, 12.0]), torch.eye(3)[:2]
    assert Rule("one_sided").removed(w, V).tolist() == [3, 0, 0]
    assert Rule("two_sided").removed(w, V).tolist() == [3, -4, 0]
    assert Rule("reverse").removed(w, V).tolist() == [6, -8, 0]
    assert Rule("one_sided", overshoot=2).removed(w, V).tolist() == [6, 0, 0]
    kept = w - Rule("two_sided", preserve=True).removed(w, V)
    torch.testing.assert_close(kept, torch.tensor([0.0, 0.0, 13.0]))


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(5, 12), st.sampled_from(GATES), st.floats(0.1, 3))
def test_laws_of_the_gates(seed: int, k: int, n: int, gate: str, overshoot: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    V = torch.linalg.qr(torch.randn(n, k, generator=rng, dtype=torch.float64)).Q.t()
    w = torch.randn(n, generator=rng, dtype=torch.float64)
    rule = Rule(gate, overshoot)  # type: ignore[arg-type]
    out = rule.removed(w, V)
    torch.testing.assert_close(out, (out @ V.t()) @ V), "in the span"
    torch.testing.assert_close(rule.removed(7 * w, V), 7 * out)  # positively homogeneous, so clipping does not matter
    turn = torch.linalg.qr(torch.randn(n, n, generator=rng, dtype=torch.float64)).Q
    torch.testing.assert_close(rule.removed(turn @ w, V @ turn.t()), turn @ out)  # the same in another basis
    kept = w - Rule(gate, overshoot, preserve=True).removed(w, V)  # type: ignore[arg-type]
    torch.testing.assert_close(kept.norm(), w.norm())


def planted(pairs: int = 40) -> dict[str, Tensor]:
    """Module a: e0 at strength 3 in every pair, e1 at ±1 with 80 % plus; module b: faint noise."""
    rng = torch.Generator().manual_seed(0)
    a = 0.01 * torch.randn(pairs, 6, generator=rng)
    a[:, 0] -= 3
    a[:, 1] += torch.where(torch.arange(pairs) % 5 > 0, 1.0, -1.0)
    return {"a": a, "b": 0.001 * torch.randn(pairs, 5, generator=rng)}


def test_planted_directions_are_found_with_their_orientation() -> None:
    found = assemble(planted(), top=2, floor=0.5)
    assert list(found.basis) == ["a"], "the module without a signal falls under the one floor for all modules"
    e0, e1 = found.basis["a"]
    assert e0[0] < -0.95, "pairs say minus, so the direction points to minus"
    assert e1[1] > 0.95
    assert found.agreement["a"][0] == 1.0 and 0.6 < found.agreement["a"][1] < 0.95
    assert found.facts["heldout_accuracy"] == 1.0 and found.facts["heldout_pairs"] == 10
    assert float(found.strength["a"][0]) == pytest.approx(3, rel=0.05)
    again, other = (assemble(planted(), top=2, floor=0.5, seed=seed).strength["a"] for seed in (0, 1))
    assert torch.equal(found.strength["a"], again) and not torch.equal(again, other), "seed 0 by default"


def test_directions_that_do_not_generalise_to_heldout_pairs_warn() -> None:
    """The held-out pairs point in the opposite direction."""
    D = torch.ones(12, 3)
    D[torch.randperm(12, generator=torch.Generator().manual_seed(7))[:3]] *= -1
    with pytest.warns(GuardWarning, match="no better than chance"):
        assemble({"a": D}, top=1, floor=0, seed=7)


def test_the_difference_is_the_training_losss(make: Make) -> None:
    """Against plain autograd of the two completions' log-probs, for a mean over sequences and one over tokens."""
    engine = make()
    triple = Triple(({"role": "user", "content": "say a"},), "yes!!!", "no.")
    (prompt, bad), (_, good) = (reply_tokens(engine.policy, triple.prompt, t) for t in (triple.unwanted, triple.wanted))
    sums = []
    for reply in (bad, good):
        batch = Batch.from_rows([prompt], [reply])
        hidden = engine.policy.hidden(batch.inputs)[batch.row, batch.position]
        lp = engine.policy.head.logits(hidden).log_softmax(-1).gather(-1, batch.token_target[:, None]).sum()
        sums.append(torch.cat([g.flatten() for g in torch.autograd.grad(lp, engine.parameters)]))
    wanted = {
        "grpo": -(sums[0] / len(bad) - sums[1] / len(good)) / 2,
        "dapo": -(sums[0] - sums[1]) / (len(bad) + len(good)),
        "sft": -(sums[0] - sums[1]) / (len(bad) + len(good)),
    }
    for name, loss in {"grpo": en.GRPO(), "dapo": en.DAPO(), "sft": en.SFT()}.items():
        twice = directions_from_gradients(engine, [triple, triple, triple], loss, top=1, floor=0, heldout=0)
        raw = torch.cat([twice.strength[n] * twice.basis[n][0] for n in engine.names])
        torch.testing.assert_close(raw, wanted[name], rtol=1e-3, atol=1e-6, msg=f"{name}: normalised like its loss")


def test_descending_along_a_direction_raises_the_unwanted(make: Make) -> None:
    """A small step θ - εv makes unwanted completions more probable against wanted ones."""
    engine = make()
    found = directions_from_gradients(engine, triples(), en.GRPO())
    assert found.facts["heldout_accuracy"] > 0.5

    def gap() -> float:
        total = 0.0
        for t in triples():
            for sign, text in ((1, t.unwanted), (-1, t.wanted)):
                p, c = reply_tokens(engine.policy, t.prompt, text)
                scored = engine.score(Batch.from_rows([p], [c]), LogProbsWanted())
                assert isinstance(scored, Tensor)
                total += sign * float(scored.mean())
        return total

    before = gap()
    with torch.no_grad():
        for name, p in zip(engine.names, engine.parameters, strict=True):
            if name in found.basis:
                p.sub_(0.05 * found.basis[name][0])
    assert gap() > before


def test_activations_by_the_formula_of_delta_s(make: Make) -> None:
    """y = Wx + U(g ∘ Vx) at g = 0: D = -(Uᵀd) ∘ (V x̄), d = W(x̄ - x̄'), for the mean inputs x̄, x̄' of the two replies."""
    engine = make()
    triple = Triple(({"role": "user", "content": "say a"},), "yes!!!", "no.")
    hooks_of = [(m._forward_hooks, m._forward_pre_hooks) for m in engine.policy.model.modules()]
    before = [(len(after), len(pre)) for after, pre in hooks_of]
    found = directions_from_activations(engine, [triple] * 3, top=1, floor=0, heldout=0)
    assert [(len(after), len(pre)) for after, pre in hooks_of] == before, "a hook that stays would cut the gradients"
    inputs: dict[str, list[Tensor]] = {path: [] for path in engine.adapter.slots}
    for text in (triple.unwanted, triple.wanted):
        prompt, reply = reply_tokens(engine.policy, triple.prompt, text)
        batch = Batch.from_rows([prompt], [reply])
        hooks = [
            slot.layer.module.register_forward_pre_hook(lambda _, args, path=path: inputs[path].append(args[0][0]))
            for path, slot in engine.adapter.slots.items()
        ]
        with torch.no_grad():
            engine.policy.hidden(batch.inputs)
        for hook in hooks:
            hook.remove()
        for path in inputs:
            inputs[path][-1] = inputs[path][-1][batch.position].mean(0)
    for path, slot in engine.adapter.slots.items():
        x, other = inputs[path]
        d = slot.layer.weight() @ (x - other)
        D = -(slot.tensors["U"].t() @ d) * (slot.tensors["Vh"] @ x)
        raw = found.strength[f"{path}.g"] * found.basis[f"{path}.g"][0]
        torch.testing.assert_close(raw, D, rtol=1e-3, atol=1e-6)


def test_files(directions: Directions, tmp_path: Path) -> None:
    again = Directions.load(directions.save(tmp_path / "v.safetensors"))
    assert again.source == directions.source and again.facts == directions.facts
    assert all(torch.equal(again.tensors()[k], v) for k, v in directions.tensors().items())
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes((tmp_path / "v.safetensors").read_bytes()[:50])
    for path, what in ((torn, "not a whole"), (tmp_path / "none", "no file")):
        with pytest.raises(GuardError, match=what):
            Directions.load(path)
    with pytest.raises(GuardError, match="orthonormal"):
        Directions({"a": torch.ones(2, 4)}, {"a": torch.ones(2)})


def test_triples_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt": "hi", "unwanted": "a!", "wanted": "a."}\n\n')
    assert read_triples(path) == [Triple(({"role": "user", "content": "hi"},), "a!", "a.")]
    path.write_text('{"prompt": "hi", "unwanted": "a!"}')
    with pytest.raises(GuardError, match=r"t\.jsonl:1"):
        read_triples(path)


def test_controls_have_the_shape_and_not_the_content(directions: Directions) -> None:
    assert directions.overlap(directions) == pytest.approx(1)
    assert directions.heading(directions) == pytest.approx(1)
    for control in (random_directions(directions, 1), shuffled_directions(directions, 1)):
        assert {n: V.shape for n, V in control.basis.items()} == {n: V.shape for n, V in directions.basis.items()}
        assert directions.overlap(control) < 0.5
    mirrored = Directions({n: -V for n, V in directions.basis.items()}, directions.strength)
    assert directions.overlap(mirrored) == pytest.approx(1) and directions.heading(mirrored) == pytest.approx(-1)


def test_refreshing_is_with_the_quarantine_off_and_refuses_directions_that_disagree(
    make: Make, directions: Directions, batches: list[Batch]
) -> None:
    seen: list[list[Tensor]] = []
    near = Directions(dict(directions.basis), {n: 2 * s for n, s in directions.strength.items()})
    away = Directions({n: -V for n, V in directions.basis.items()}, directions.strength)
    answers = iter([near, away])

    def extract() -> Directions:
        seen.append([p.detach().clone() for p in engine.parameters])
        return next(answers)

    guard = Route(directions, every=2, extract=extract)
    engine = make(guard)
    loss = en.GRPO(clip=0.5)
    engine.step(batches[0], loss)
    found = engine.step(batches[1], loss).update.guard
    assert found["adopted"] == 1 and found["overlap"] == pytest.approx(1) and guard.directions is near
    with guard.ablated():
        main = [p.detach().clone() for p in engine.parameters]
    assert all(torch.equal(a, b) for a, b in zip(seen[0], main, strict=True)), "extracted on the ablated policy"
    engine.step(batches[2], loss)
    with pytest.warns(GuardWarning, match="disagree with the old ones"):
        found = engine.step(batches[3], loss).update.guard
    assert found["adopted"] == 0 and found["heading"] == pytest.approx(-1) and guard.directions is near


def test_refusals(make: Make, directions: Directions) -> None:
    with pytest.raises(GuardError, match="two trained factors"):
        make(Route(directions), adapter=en.LoRA(rank=2))
    with pytest.raises(GuardError, match="not a parameter of this adapter"):
        make(Erase(directions), adapter=en.LoRA(rank=2, freeze_a=True))
    guard = Erase(directions)
    make(guard)
    with pytest.raises(GuardError, match="already has an engine"):
        make(guard)
    with pytest.raises(GuardError, match="refreshing needs"):
        Route(directions, every=3)
    with pytest.raises(GuardError, match="did you mean 'one_sided'"):
        Erase(directions, gate="one_side")  # type: ignore[arg-type]
    with pytest.raises(GuardError, match="two different ones"):
        directions_from_gradients(make(), [Triple(triples()[0].prompt, "a", "a")] * 3, en.GRPO())
    with pytest.raises(GuardError, match="has no engine yet"), Route(directions).ablated():
        pass
