"""Vectors: their values by hand, their effect on the stream, and the removal of their hooks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import earnest as en
from earnest.steering import SteeringError, Vector, mean_difference, principal, weight_space
from earnest.steering.sites import block_paths, tag_states
from tests.engines.conftest import perturb, tiny_policy
from tests.steering.conftest import logits

Contexts = tuple[list[list[int]], list[list[int]]]


def stream(policy: en.Policy, ids: list[int], path: str) -> torch.Tensor:
    """The output of a module at every position, from a separate hook."""
    found = []
    handle = policy.model.get_submodule(path).register_forward_hook(
        lambda _, __, out: found.append(out[0] if isinstance(out, tuple) else out)
    )
    logits(policy, ids)
    handle.remove()
    return found[0][0]


def test_the_mean_difference_is_that_of_the_last_tokens_computed_one_by_one(
    nano: en.Policy, contexts: Contexts
) -> None:
    """Contexts of different lengths in one padded batch: a state from a padded place would differ."""
    high, low = contexts
    assert len({len(c) for c in high}) > 1
    path = block_paths(nano, [2])[0]
    alone = [stream(nano, c, path)[-1] for c in (*high, *low)]
    expected = torch.stack(alone[: len(high)]).mean(0) - torch.stack(alone[len(high) :]).mean(0)
    made = mean_difference(nano, high, low, [2])
    torch.testing.assert_close(made.shifts[path], expected, rtol=1e-4, atol=1e-5)
    assert "8 contexts" in made.made


def test_the_states_do_not_depend_on_the_cut_into_batches(nano: en.Policy, contexts: Contexts) -> None:
    paths = block_paths(nano)
    whole, cut = tag_states(nano, contexts[0], paths), tag_states(nano, contexts[0], paths, rows=3)
    for path in paths:
        torch.testing.assert_close(whole[path], cut[path], rtol=1e-4, atol=1e-5)


def test_applied_adds_exactly_the_dose_and_removes_its_hooks(nano: en.Policy, contexts: Contexts) -> None:
    vector = mean_difference(nano, *contexts, [1])
    (path,), ids = vector.shifts, contexts[0][0]
    before, plain = stream(nano, ids, path), logits(nano, ids)
    with vector.applied(nano, 0.5):
        torch.testing.assert_close(stream(nano, ids, path), before + 0.5 * vector.shifts[path])
        assert (logits(nano, ids) - plain).abs().max() > 0.1
        with vector.applied(nano, -0.5):
            torch.testing.assert_close(stream(nano, ids, path), before, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(nano, ids), plain)
    with pytest.raises(RuntimeError, match="on purpose"), vector.applied(nano, 3.0):
        raise RuntimeError("on purpose")
    assert torch.equal(logits(nano, ids), plain), "also behind an error"


def test_ablated_leaves_no_component_and_nothing_else(nano: en.Policy, contexts: Contexts) -> None:
    vector = mean_difference(nano, *contexts, [1])
    (path,), ids = vector.shifts, contexts[0][0]
    before = stream(nano, ids, path)
    unit = vector.shifts[path] / vector.shifts[path].norm()
    assert (before @ unit).abs().max() > 1
    with vector.ablated(nano):
        after = stream(nano, ids, path)
    assert (after @ unit).abs().max() < 1e-3
    torch.testing.assert_close(before - after, (before @ unit)[:, None] * unit, rtol=1e-3, atol=1e-3)
    with vector.ablated(nano, 0.5):
        torch.testing.assert_close(stream(nano, ids, path) @ unit, 0.5 * (before @ unit), rtol=1e-3, atol=1e-3)


def test_principal_points_from_low_to_high(nano: en.Policy, contexts: Contexts) -> None:
    high, low = contexts
    up = principal(nano, high, low, [1, 2])
    assert up.cosine(mean_difference(nano, high, low, [1, 2])) > 0.9
    assert up.cosine(principal(nano, low, high, [1, 2])) == pytest.approx(-1, abs=1e-3)


def test_principal_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences (3, 0), (5, 0), (0, 1): the first direction is almost e₁; its length the mean projection."""
    from earnest.steering import vectors

    policy = tiny_policy()
    given_differences = torch.tensor([[3.0, 0.0], [5.0, 0.0], [0.0, 1.0]])
    monkeypatch.setattr(vectors, "_differences", lambda *a, **k: {"x": given_differences})
    found = principal(policy, [[1]] * 3, [[1]] * 3, [0]).shifts["x"]
    torch.testing.assert_close(found, torch.tensor([8 / 3, 0.0]))


def test_the_weight_space_at_full_rank_is_w_times_the_inputs_difference(nano: en.Policy, contexts: Contexts) -> None:
    """An identity that holds for any weight; with an active adapter the weight is the student's."""
    path = "model.layers.1.mlp.down_proj"
    adapter = en.attach(nano, en.LoRA(rank=2), targets=("down_proj",))
    perturb(adapter)
    try:
        outputs = [tag_states(nano, side, [path])[path].mean(0) for side in contexts]
        full = weight_space(nano, *contexts, paths=[path], rank=None)
        torch.testing.assert_close(full.shifts[path], outputs[0] - outputs[1], rtol=1e-3, atol=1e-3)
        cosines = [full.cosine(weight_space(nano, *contexts, [1], rank=rank)) for rank in (1, 8, 64)]
        assert cosines == sorted(cosines) and cosines[0] > 0 and cosines[-1] > 0.95
        with full.applied(nano, 1.0):
            pass
    finally:
        adapter.detach()
    with pytest.raises(SteeringError, match="rank is 0"):
        weight_space(nano, *contexts, paths=[path], rank=0)
    with pytest.raises(SteeringError, match="not a linear layer"):
        weight_space(nano, *contexts, paths=["model.layers.1"])


@given(st.floats(-5, 5), st.floats(-5, 5), st.integers(0, 2**20))
def test_vectors_are_a_vector_space(a: float, b: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    one, two = (
        Vector({"x": torch.randn(5, generator=generator), "y": torch.randn(3, generator=generator)}, "made", "base")
        for _ in range(2)
    )
    mixed = {p: a * one.shifts[p] + b * two.shifts[p] for p in ("x", "y")}
    if min(abs(a), abs(b)) > 1e-3:
        got = one * a + b * two
        for path, value in mixed.items():
            torch.testing.assert_close(got.shifts[path], value, rtol=1e-5, atol=1e-5)
        assert (one * a).cosine(one) == pytest.approx(1 if a > 0 else -1)
    assert (-one).cosine(one) == pytest.approx(-1) and one.norm == pytest.approx((one * 2.0).norm / 2)


def test_on_disk_and_back(nano: en.Policy, contexts: Contexts, tmp_path: Path) -> None:
    vector = mean_difference(nano, *contexts)
    back = Vector.load(vector.save(tmp_path / "deep" / "v.safetensors"))
    assert back.made == vector.made and back.base == vector.base and list(back.shifts) == sorted(vector.shifts)
    assert all(torch.equal(back.shifts[p], s) for p, s in vector.shifts.items())
    with back.applied(nano, 0.1):
        pass
    other = tiny_policy(torch.float32)
    with pytest.raises(SteeringError, match="made on another model"):
        back.applied(other)
    with pytest.raises(SteeringError, match="cannot be read"):
        Vector.load(tmp_path / "none.safetensors")
    en.attach(other, en.LoRA(rank=2), targets=("q_proj",)).save(tmp_path / "adapter")
    with pytest.raises(SteeringError, match="no steering vector"):
        Vector.load(tmp_path / "adapter" / "earnest_adapter.safetensors")


def test_what_is_refused(nano: en.Policy, contexts: Contexts) -> None:
    high, low = contexts
    for words, make in {
        "layer 9 does not exist": lambda: mean_difference(nano, high, low, [9]),
        "layers is empty": lambda: mean_difference(nano, high, low, []),
        "come in pairs": lambda: mean_difference(nano, high, low[1:]),
        "do not differ": lambda: mean_difference(nano, high, high),
        "empty one": lambda: mean_difference(nano, [[]], [[1]]),
        "different modules": lambda: mean_difference(nano, high, low, [0]) + mean_difference(nano, high, low, [1]),
        "at least one module": lambda: Vector({}, "made", "base"),
        "finite": lambda: Vector({"x": torch.tensor([float("nan")])}, "made", "base"),
        "no module 'nowhere'": lambda: (
            Vector({"nowhere": torch.ones(2)}, "m", nano.fingerprint()).applied(nano).__enter__()
        ),
    }.items():
        with pytest.raises(SteeringError, match=words):
            make()


def test_other_architectures_have_blocks_and_writers_too() -> None:
    """GPT-2 names everything differently, stores its weights transposed, and may give tuples."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from earnest.models.policy import Policy
    from tests.engines.words import word_tokenizer

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=131, n_embd=16, n_layer=2, n_head=2, n_positions=32, eos_token_id=1)
    policy = Policy.of(GPT2LMHeadModel(config), word_tokenizer(131), name="gpt2")
    high, low = [[3, 4, 5], [6, 7]], [[3, 9, 5], [6, 8]]
    plain = logits(policy, high[0])
    for make in (mean_difference, principal, weight_space):
        vector = make(policy, high, low, [-1])
        with vector.applied(policy, 5.0):
            assert not torch.equal(logits(policy, high[0]), plain)
        assert torch.equal(logits(policy, high[0]), plain)
