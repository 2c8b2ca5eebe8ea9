"""Products with rearranged weights: the same policy, the present weights, and no trace afterwards."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import earnest as en
from earnest.models import Policy, SampleSpec, products, sample
from earnest.models.sampling import pick
from tests.models import tiny
from tests.models.test_sampling import close, teacher_forced

PROMPTS = [[5, 6, 7, 8], [9, 10]]
SPEC = SampleSpec(max_new_tokens=32, seed=3, stop_ids=())


def wide() -> Policy:
    """Its MLP weights have 512 × 1,024 elements."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tiny.V, hidden_size=512, intermediate_size=1024, num_hidden_layers=1, num_attention_heads=8
    )
    return Policy.of(LlamaForCausalLM(config), tiny.tokenizer())


@lru_cache
def shared() -> Policy:
    return wide()


def replaced(policy: Policy) -> list[str]:
    return [name for name, module in policy.model.named_modules() if "forward" in vars(module)]


def test_completions_are_those_of_the_plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, seen = shared(), 0
    made = products._forward

    def counted(*given: torch.Tensor) -> object:
        nonlocal seen
        seen += 1
        return made(*given)

    monkeypatch.setattr(products, "_forward", counted)
    fast = sample(policy, PROMPTS, 8, SPEC)
    assert seen == 7, "four projections of the attention and three of the MLP"
    assert not replaced(policy)
    monkeypatch.setattr(products, "_PAYS", 10**9)
    close(fast, sample(policy, PROMPTS, 8, SPEC))


def test_few_tokens_are_sampled_without_copies() -> None:
    with products.packed(shared(), 100):
        assert not replaced(shared())


def test_a_merged_adapter_and_later_updates_are_in_the_products() -> None:
    policy = wide()
    engine = en.LocalEngine(policy, en.attach(policy, en.LoRA(rank=4)))
    for _ in range(2):
        with torch.no_grad():
            for parameter in engine.parameters:
                parameter.add_(0.05 * torch.randn_like(parameter))
        for rollout in engine.sample(PROMPTS, 8, SPEC)[::8]:
            want = teacher_forced(policy, list(rollout.prompt), rollout.tokens, SPEC)
            assert rollout.logprobs == pytest.approx(want, abs=1e-4)


def test_a_module_whose_adapter_is_beside_it_keeps_its_forward() -> None:
    policy = wide()
    adapter = en.attach(policy, en.LoRA(rank=4), targets=("up_proj",))
    beside = "model.layers.0.mlp.up_proj"
    with torch.no_grad(), products.packed(policy, 10_000):
        assert beside not in replaced(policy) and len(replaced(policy)) == 6
    with adapter.merged(), torch.no_grad(), products.packed(policy, 10_000):
        assert beside in replaced(policy)


def test_an_error_inside_leaves_no_copies() -> None:
    with pytest.raises(KeyError), torch.no_grad(), products.packed(shared(), 10_000):
        raise KeyError
    assert not replaced(shared())


@pytest.mark.parametrize("vocabulary", [8193, 10_240, 49_152])
def test_the_token_of_a_number_in_a_large_vocabulary(vocabulary: int) -> None:
    """Against one pass over the whole vocabulary in float64, with tokens that are left out at both ends."""
    torch.manual_seed(vocabulary)
    logits = 3 * torch.randn(64, vocabulary)
    logits[:32, :500] = logits[:32, -700:] = -torch.inf
    u = torch.rand(64, dtype=torch.float64)
    u[:4] = torch.tensor([0.0, 1 - 2**-53, 1e-300, 0.5])
    token, logprob = pick(logits, u, SampleSpec())
    p = logits.softmax(-1).double()
    cdf = p.cumsum(-1)
    for row, found in enumerate(token.tolist()):
        goal = float(u[row] * cdf[row, -1])
        assert float(cdf[row, found]) >= goal - 1e-12 and (found == 0 or float(cdf[row, found - 1]) <= goal + 1e-12)
        assert float(p[row, found]) > 0
        assert float(logprob[row]) == pytest.approx(float(p[row, found].log()), abs=1e-5)
