"""Packed copies of the weights change the sampler's speed and nothing else: the log-probs are the policy's own, a
weight that changes is copied again, and outside of a step the model has its own parameters."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import nn

from earnest.models import Completion, Policy, SampleSpec, packed, sample
from earnest.models.packed import PackedWeights, packable
from earnest.models.sampling import SampleRow, evaluating
from earnest.models.slots import SlotSampler
from tests.models import tiny

PROMPTS = [[5, 6, 7, 8, 9, 10], [7], [8, 9, 30]]
SPEC = SampleSpec(max_new_tokens=packed.PACKED_FROM, seed=7, stop_ids=())
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of tiny models are packed, too."""
    monkeypatch.setattr(packed, "_LEAST", 1)


def scored(policy: Policy, prompt: list[int], tokens: tuple[int, ...]) -> list[float]:
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        found = policy.head.logits(policy.hidden(ids))[0, len(prompt) - 1 : -1].log_softmax(-1)
    return [float(v) for v in found.gather(1, torch.tensor(tokens)[:, None])[:, 0]]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen2"])
def test_the_log_probs_are_the_policys(kind: str) -> None:
    """qwen2 has biases; the head of llama is tied to the embedding."""
    policy = tiny.policy(kind)
    assert packable(policy.model)
    for c in sample(policy, PROMPTS, 2, SPEC):
        assert c.logprobs == pytest.approx(scored(policy, PROMPTS[c.prompt_index], c.tokens), abs=1e-4)


def test_the_sampler_computes_with_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of other values give other log-probs."""
    policy = tiny.policy("llama")
    want = sample(policy, PROMPTS, 2, SPEC)
    real = torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", lambda w, rows: real(1.5 * w, rows))
    assert [c.logprobs for c in sample(policy, PROMPTS, 2, SPEC)] != [c.logprobs for c in want]
    few = SampleSpec(max_new_tokens=packed.PACKED_FROM - 1, seed=7, stop_ids=())
    for c in sample(policy, PROMPTS, 2, few):  # too few tokens to pay for the copies
        assert c.logprobs == pytest.approx(scored(policy, PROMPTS[c.prompt_index], c.tokens), abs=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen2"])
@pytest.mark.parametrize("new", [3, packed.PACKED_FROM])
def test_one_row_is_multiplied_with_halves_of_the_weights(kind: str, new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without copies, with the policy's log-probs; the products of every token but the prompt's are such."""
    policy = tiny.policy(kind)
    calls: list[int] = []
    inner = packed._one_row
    monkeypatch.setattr(packed, "_halves_are_faster", lambda: True)

    def one_row(x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        calls.append(x.numel())
        return inner(x, *more)

    monkeypatch.setattr(packed, "_one_row", one_row)
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", None)  # an error if it is called
    (c,) = sample(policy, PROMPTS[:1], 1, SampleSpec(max_new_tokens=new, seed=7, stop_ids=()))
    assert c.logprobs == pytest.approx(scored(policy, PROMPTS[0], c.tokens), abs=1e-4)
    layers = sum(m.out_features % 2 == 0 for m in packed.linears(policy.model) if m is not policy.head.module)
    assert len(calls) == (new - 1) * layers + new * (policy.head.weight.shape[0] % 2 == 0)


@pytest.mark.parametrize("slow", ["halves", "whole"])
def test_one_row_is_multiplied_by_what_takes_less_time(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which product that is depends on the processor; here one of them does its work fifty times."""
    owner, name = (packed, "_one_row") if slow == "halves" else (nn.functional, "linear")
    product = getattr(owner, name)

    def again(*given: torch.Tensor) -> torch.Tensor:
        return [product(*given) for _ in range(50)][-1]

    monkeypatch.setattr(owner, name, again)
    assert packed._halves_are_faster.__wrapped__() == (slow == "whole")


def completions_with_a_change(policy: Policy, write: str) -> list[Completion]:
    """The weights change after the fourth token; at the end the model has its own again."""
    layers = [m for m in policy.model.modules() if isinstance(m, nn.Linear)]
    kept = [m.weight for m in layers]
    for m in layers:
        m.weight = nn.Parameter(m.weight.detach().clone(), requires_grad=False)  # version 0, like its replacement
    with evaluating(policy):
        slots = SlotSampler(policy, SPEC)
        slots.submit(SampleRow(i, 0, tuple(p), 0) for i, p in enumerate(PROMPTS))
        done: list[Completion] = []
        for step in range(SPEC.max_new_tokens):
            if step == 4:
                for m in layers:
                    if write == "in place":
                        m.weight.mul_(1.5)
                    elif write == "through .data":
                        m.weight.data.mul_(1.5)
                    elif write == "a permutation through .data":
                        m.weight.data.copy_(m.weight.data.flip(1).clone())
                    elif write == "other .data":
                        m.weight.data = 1.5 * m.weight.data
                    else:
                        m.weight = nn.Parameter(1.5 * m.weight, requires_grad=False)
            done += [c for _, c in slots.step()]
            assert all(type(m.weight) is nn.Parameter for m in layers)
        for m, weight in zip(layers, kept, strict=True):
            m.weight = weight
    return sorted(done, key=lambda c: c.prompt_index)


WRITES = ("in place", "through .data", "a permutation through .data", "other .data", "another parameter")


@pytest.mark.parametrize("write", WRITES)
def test_a_weight_that_changes_is_copied_again(write: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny.policy("llama")
    found = completions_with_a_change(policy, write)
    monkeypatch.setattr(packed, "packable", lambda model: [])
    want = completions_with_a_change(policy, write)
    assert [c.tokens for c in found] == [c.tokens for c in want]
    for a, b in zip(found, want, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        assert a.logprobs != pytest.approx(scored(policy, PROMPTS[a.prompt_index], a.tokens), abs=1e-4)


def test_the_model_has_its_own_parameters_afterwards() -> None:
    policy = tiny.policy("llama")
    before, layers = dict(policy.model.named_parameters()), packable(policy.model)
    with torch.no_grad(), suppress(ZeroDivisionError), PackedWeights(policy):
        assert any(type(m.weight) is not nn.Parameter for m in layers)
        raise ZeroDivisionError
    after = dict(policy.model.named_parameters())
    assert before.keys() == after.keys() and all(after[name] is p for name, p in before.items())


def test_a_gradient_passes_through_the_own_weight() -> None:
    policy = tiny.policy("llama")
    layer = next(m for m in policy.model.modules() if isinstance(m, nn.Linear))
    x = torch.randn(3, layer.in_features, requires_grad=True)
    with PackedWeights(policy):
        layer(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand_as(x))


def test_only_float32_weights_are_packed_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.policy("llama").model
    sizes = [m.in_features * m.out_features for m in packable(model)]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) == 15
    monkeypatch.setattr(packed, "PACKED_BYTES", 4 * sum(sizes[:3]))
    assert [m.in_features * m.out_features for m in packable(model)] == sizes[:3]
    assert packable(model.bfloat16()) == []
