"""The head law: head.logits(hidden(x)) is model(x).logits, and a head that breaks it is refused."""

from __future__ import annotations

import pytest
import torch

from earnest.errors import UnusableModel
from earnest.models import Policy
from tests.models import tiny

# kind -> (scale, softcap, tied, bias)
HEADS = {
    "llama": (None, None, True, False),
    "llama_untied": (None, None, False, False),
    "qwen2": (None, None, False, False),
    "qwen3": (None, None, False, False),
    "gpt2": (None, None, True, False),
    "gemma2": (None, 0.7, True, False),
    "gemma3": (None, None, True, False),
    "granite": (0.125, None, False, False),
    "cohere": (0.25, None, True, False),
    "phi_bias": (None, None, False, True),
}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_law(kind: str, dtype: torch.dtype) -> None:
    policy = Policy.of(tiny.model(kind).to(dtype), tiny.tokenizer())
    ids = torch.randint(0, tiny.V, (3, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want, got = policy.model(ids).logits.float(), policy.head.logits(policy.hidden(ids)).float()
    room = 1e-5 if dtype is torch.float32 else 2e-2
    assert (want - got).abs().max() <= room * want.abs().max()
    head = policy.head
    assert (head.scale, head.softcap, head.tied, head.bias is not None) == HEADS[kind]
    assert head.weight.shape == (tiny.V, 32)
    assert policy.dtype == dtype == head.weight.dtype


@pytest.mark.parametrize(("kind", "lost"), [("gemma2", "softcap"), ("granite", "scale"), ("cohere", "scale")])
def test_without_scale_or_softcap_the_head_law_fails(kind: str, lost: str) -> None:
    """Without the one number that makes this architecture special, the law fails clearly."""
    policy = tiny.policy(kind)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        want, hidden = policy.model(ids).logits, policy.hidden(ids)
        raw = policy.head.module(hidden)
        assert (raw - want).abs().max() > 0.1 * want.abs().max()
        assert torch.allclose(policy.head.shape(raw), want, atol=1e-5)
    assert getattr(policy.head, lost) is not None


def test_hand_worked_shape() -> None:
    """cap·tanh(s·x/cap) at x = 2, s = 3, cap = 6: 6·tanh(1) = 4.569565."""
    head = tiny.policy("llama").head
    shaped = type(head)(head.module, softcap=6.0, scale=3.0, tied=True).shape(torch.tensor([2.0, 0.0]))
    assert shaped.tolist() == pytest.approx([4.569565, 0.0], abs=1e-5)


def test_a_head_that_differs_from_its_config_is_refused() -> None:
    model = tiny.model("llama_untied")
    plain = model.lm_head.forward
    forward = type(model).forward

    class Odd(type(model)):  # type: ignore[misc]
        def forward(self, *args: object, **kwargs: object) -> object:
            out = forward(self, *args, **kwargs)
            out.logits = out.logits * 1.5
            return out

    model.__class__ = Odd
    assert model.lm_head.forward == plain
    with pytest.raises(UnusableModel, match="in a way that earnest does not support"):
        Policy.of(model, tiny.tokenizer())


def test_a_model_without_an_output_layer_is_refused() -> None:
    with pytest.raises(UnusableModel, match="no linear output layer"):
        Policy.of(tiny.model("llama").model, tiny.tokenizer())


def test_an_adapter_on_the_head_takes_effect_and_is_detected() -> None:
    policy = tiny.policy("llama_untied")
    head = policy.head
    assert head.plain
    hidden = torch.randn(2, 32)
    before = head.logits(hidden)
    base = head.module.forward
    head.module.forward = lambda x: base(x) + 1.0  # type: ignore[method-assign]
    assert not head.plain
    assert torch.allclose(head.logits(hidden), before + 1.0)
    del head.module.forward
    handle = head.module.register_forward_hook(lambda *_: None)
    assert not head.plain
    handle.remove()
    assert head.plain
