"""A step of the decoder is a step of the model, bit for bit, with adapters and hooks; a body that it does not know is
left to the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from earnest.adapters import LoRA, attach
from earnest.adapters.variants.full import Full
from earnest.models import Policy, SampleSpec, load, sample
from earnest.models.cache import Cached, start
from earnest.models.decoding import BodyDecoder, find_decoder
from tests.models import tiny

FAMILIES = {"llama", "llama_untied", "qwen2", "qwen3"}
IDS = [5, 9, 6, 30, 12]


def steps(policy: Policy, lengths: list[int], fast: bool, count: int = 12) -> list[Tensor]:
    """The hidden states after each of ``count`` tokens of three rows; with the decoder or with the model."""
    order = torch.tensor([len(lengths) - 1, 0, len(lengths) - 1])
    found = []
    with torch.no_grad():
        rows = start(policy, "buffered", [IDS[:n] for n in lengths], order, count, probing=not fast)
        assert isinstance(rows, Cached) and (rows.decoder is not None) == fast
        for step in range(count):
            rows.step(torch.tensor([(7 * step + 3 * row) % 30 + 4 for row in range(3)]))
            found.append(rows.last)
    return found


def same(policy: Policy) -> bool:
    """Whether decoder and model give the same bits, for ragged prompts and for equal ones."""
    return all(
        torch.equal(a, b)
        for lengths in ([5, 2], [4, 4], [3])
        for a, b in zip(steps(policy, lengths, True), steps(policy, lengths, False), strict=True)
    )


@pytest.mark.parametrize("kind", tiny.CONFIGS)
def test_only_known_bodies_have_a_decoder(kind: str) -> None:
    assert (tiny.policy(kind).decoder is not None) == (kind in FAMILIES)


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_the_hidden_states_are_the_models_bit_for_bit(kind: str) -> None:
    assert same(tiny.policy(kind))


def test_nano() -> None:
    assert same(load("nano"))


def test_scaled_positions() -> None:
    scaled = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    assert same(tiny.policy("llama", rope_parameters=scaled))


def test_the_sampler_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, calls = tiny.policy("llama"), []
    inner = BodyDecoder.__call__
    monkeypatch.setattr(BodyDecoder, "__call__", lambda self, *given: calls.append(1) or inner(self, *given))  # type: ignore[func-returns-value]
    _ = policy.decoder
    calls.clear()
    sample(policy, [[5, 6], [7]], 2, SampleSpec(max_new_tokens=5, stop_ids=()))
    assert len(calls) == 4  # the last token is not read


@pytest.mark.parametrize("variant", [LoRA(rank=2), Full()], ids=["lora", "full"])
def test_adapters_act(variant: Any) -> None:
    """An adapter changes classes of linear layers, and full training those of norms and of the embedding."""
    policy = tiny.policy("qwen3")
    plain = steps(policy, [5, 2], True)
    targets = ["q_proj", "down_proj"] if isinstance(variant, LoRA) else "all"
    adapter = attach(policy, variant, targets=targets)
    with torch.no_grad():
        for tensor in adapter.parameters():
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    assert not torch.equal(steps(policy, [5, 2], True)[-1], plain[-1])
    assert same(policy)
    adapter.detach()
    assert torch.equal(steps(policy, [5, 2], True)[-1], plain[-1])


@pytest.mark.parametrize("part", ["input_layernorm", "mlp.up_proj", "mlp", "self_attn", ""])
@pytest.mark.parametrize("how", ["hook", "pre-hook", "forward"])
def test_hooks_act_and_so_does_another_forward(part: str, how: str) -> None:
    policy = tiny.policy("llama")
    plain = steps(policy, [5, 2], True)
    module = policy.body.layers[1].get_submodule(part)  # type: ignore[union-attr, index]
    undo = change(module, how)
    assert same(policy)
    assert not torch.equal(steps(policy, [5, 2], True)[-1], plain[-1]), "it acts"
    undo()
    assert torch.equal(steps(policy, [5, 2], True)[-1], plain[-1])


def change(module: nn.Module, how: str) -> Any:
    """Make the module's output, or its input, one and a half times as large; returns what undoes it."""

    def scaled(x: Any) -> Any:
        return (1.5 * x[0], *x[1:]) if isinstance(x, tuple) else 1.5 * x

    if how == "hook":
        return module.register_forward_hook(lambda _, __, out: scaled(out)).remove
    if how == "pre-hook":

        def before(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if given:
                return (1.5 * given[0], *given[1:]), named
            return given, named | {"hidden_states": 1.5 * named["hidden_states"]}

        return module.register_forward_pre_hook(before, with_kwargs=True).remove
    own = module.forward
    module.forward = lambda *given, **named: scaled(own(*given, **named))
    return lambda: module.__dict__.pop("forward")


def test_a_decoder_with_wrong_states_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny.policy("llama")
    inner = BodyDecoder.__call__
    monkeypatch.setattr(BodyDecoder, "__call__", lambda self, *given: 1.1 * inner(self, *given))
    assert find_decoder(policy) is not None and policy.decoder is None
