"""Packed rows through flex-attention: the choice, its test on the model, and the gradient of SDPA.

Torch has a dense form of flex-attention with a backward pass, but refuses it on a CPU. ``dense_flex`` turns that
refusal off, so the layout, the masks and the path through the model run here as on a GPU, without its kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from transformers.integrations import flex_attention as transformers_flex

import earnest as en
from earnest.engines import LocalEngine, flex
from earnest.engines.packing import Attention, Packer, _no_flex, packer_of
from earnest.errors import ConfigError
from earnest.models.policy import Policy
from earnest.signals import Batch
from tests.engines.conftest import VOCABULARY, tiny_policy
from tests.engines.test_local import close
from tests.engines.test_packing import packing

Make = Callable[..., LocalEngine]


@pytest.fixture
def dense_flex(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Flex-attention in its dense form, on a CPU; the list gets the length of every row that it computes."""
    calls: list[int] = []

    def uncompiled(query: Any, key: Any, value: Any, training: bool = False, **given: Any) -> Any:
        calls.append(query.shape[2])
        return torch_flex.flex_attention(query, key, value, **given)

    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torch_flex, "_WARNINGS_SHOWN", {"flex_attention_performance"}, raising=False)
    monkeypatch.setattr(transformers_flex, "compile_friendly_flex_attention", uncompiled)
    return calls


def ragged() -> Batch:
    """Three prompts with four completions each, longer together than one block of flex-attention (128 tokens)."""
    g = torch.Generator().manual_seed(0)

    def tokens(n: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (n,), generator=g).tolist()

    prompts = [tokens(n) for n in (17, 23, 5)]
    sizes = [3, 18, 7, 1, 12, 9, 20, 2, 15, 6, 11, 4]
    return Batch.from_rows([prompts[i // 4] for i in range(12)], [tokens(n) for n in sizes], role="demonstration")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
def test_the_gradient_is_that_of_masked_sdpa(make_engine: Make, dense_flex: list[int], again: bool) -> None:
    settings = {"pack": True, "checkpoint_activations": again}
    flexible = packing(make_engine(packed_attention="flex", **settings))
    masked = packing(make_engine(packed_attention="sdpa", **settings))
    batch = ragged()
    dense_flex.clear()
    close(masked.gradients(batch, en.SFT()), flexible.gradients(batch, en.SFT()), 1e-6)
    assert len(dense_flex) == (4 if again else 2)  # two layers, in the forward pass and where it is computed again
    assert dense_flex[0] > 128
    found = [e.step(batch, en.SFT()) for e in (flexible, masked)]
    assert [report.layout for report in found] == ["packed (flex_attention)", "packed (masked sdpa)"]
    assert found[0].update.gradient_norm == pytest.approx(found[1].update.gradient_norm, rel=1e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_nano_has_the_gradient_of_masked_sdpa(dense_flex: list[int]) -> None:
    found = []
    kinds: tuple[Attention | None, ...] = ("flex", "sdpa", None)
    for attention in kinds:
        policy = en.load("nano")
        adapter = en.attach(policy, en.LoRA(rank=4), targets="all-linear", seed=0)
        engine = LocalEngine(policy, adapter, pack=attention is not None, packed_attention=attention)
        found.append(engine.gradients(ragged(), en.SFT()))
    assert dense_flex
    for other in found[1:]:
        for name, gradient in other.items():
            assert float((found[0][name] - gradient).norm()) <= 1e-4 * float(gradient.norm()) + 1e-7, name


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_rows_without_a_mask_are_computed_as_before(make_engine: Make, dense_flex: list[int]) -> None:
    """Scoring the base, sampling and padded rows use SDPA after flex-attention is installed."""
    engine = packing(make_engine(packed_attention="flex", pack=True, dtype=torch.float32))
    assert engine.policy.model.config._attn_implementation == flex.NAME
    dense_flex.clear()
    plain = make_engine(pack=False, dtype=torch.float32)
    ids = torch.arange(12)[None] + 3
    assert torch.equal(engine.policy.hidden(ids), plain.policy.hidden(ids))
    spec = en.SampleSpec(max_new_tokens=4, seed=1)
    ours, theirs = (e.sample([[5, 6, 7], [8]], 2, spec) for e in (engine, plain))
    assert [r.tokens for r in ours] == [r.tokens for r in theirs]
    assert not dense_flex


def test_without_a_backward_pass_the_reason_is_reported_or_raised(make_engine: Make) -> None:
    """Torch's flex-attention has none on a CPU. There the default is masked SDPA, and asking for flex is an error."""
    reason = "NotImplementedError: FlexAttention does not support backward on CPU"
    with pytest.raises(ConfigError, match=rf"^engine\.packed_attention: flex does not work here: {reason}"):
        packer_of(tiny_policy(), "flex")
    policy = tiny_policy()
    assert str(_no_flex(policy, Packer(policy))).startswith(reason)
    assert policy.model.config._attn_implementation == "sdpa"  # as before


def test_a_gpu_takes_flex_attention_and_says_why_if_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy()
    tested: list[str | None] = [None, "its gradient is 0.3 from that of SDPA"]
    monkeypatch.setattr("earnest.engines.packing._no_flex", lambda *_: tested.pop(0))
    monkeypatch.setattr("earnest.engines.packing._obeys", lambda *_: True)
    policy.device = torch.device("cuda")
    found = [packer_of(policy) for _ in range(2)]
    assert [(p.attention, p.ran) for p in found if isinstance(p, Packer)] == [
        ("flex", "flex_attention"),
        ("sdpa", "masked sdpa; flex_attention: its gradient is 0.3 from that of SDPA"),
    ]
    assert isinstance(only := packer_of(policy, "sdpa"), Packer) and only.ran == "masked sdpa"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_wrong_gradient_is_found_by_the_test_on_the_model(
    monkeypatch: pytest.MonkeyPatch, dense_flex: list[int]
) -> None:
    def attentive() -> Policy:
        """Its attention depends on the keys."""
        policy = tiny_policy()
        for name, weight in policy.model.named_parameters():
            weight.data *= 20 if "q_proj" in name or "k_proj" in name else 1
        return policy

    right = transformers_flex.compile_friendly_flex_attention

    def detached(query: Any, key: Any, value: Any, **given: Any) -> Any:
        return right(query, key.detach(), value, **given)

    policy = attentive()
    assert _no_flex(policy, Packer(policy)) is None
    monkeypatch.setattr(transformers_flex, "compile_friendly_flex_attention", detached)
    policy = attentive()
    assert "from that of SDPA" in str(_no_flex(policy, Packer(policy)))
    assert policy.model.config._attn_implementation == "sdpa"


@pytest.mark.slow  # compiles a kernel
def test_the_compiled_kernel_gives_the_hidden_states_of_masked_sdpa() -> None:
    """Torch's own kernel for CPUs, which has no backward pass."""
    policy, batch = en.load("nano"), ragged()
    states = []
    kinds: tuple[Attention, ...] = ("sdpa", "flex")
    for attention in kinds:
        if attention == "flex":
            flex.install(policy)
        packer = Packer(policy, attention)
        packer.balance = 1e6
        with torch.no_grad():
            states.append(packer.pack(batch, 10**6, one_block=True).hidden(policy))
    assert float((states[1] - states[0]).norm()) <= 1e-4 * float(states[0].norm())


def test_every_pair_of_tokens_in_both_masks(make_engine: Make) -> None:
    packer = packing(make_engine(pack=True)).layouts.packing
    assert isinstance(packer, Packer)
    batch = ragged()
    dense = packer.pack(batch, 10**6, one_block=True).blocks[0]
    packer.attention = "flex"
    blocks = packer.pack(batch, 10**6, one_block=True).blocks[0]
    assert isinstance(dense.mask, torch.Tensor) and isinstance(blocks.mask, torch_flex.BlockMask)
    rows, _, length, _ = dense.mask.shape
    r, q, k = (torch.arange(n) for n in (rows, length, length))
    sees = blocks.mask.mask_mod(r[:, None, None], torch.tensor(0), q[None, :, None], k[None, None, :])
    assert torch.equal(sees, dense.mask[:, 0] == 0)
