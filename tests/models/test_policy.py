"""A policy's text, special tokens and weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from earnest.errors import EarnestError, UnusableModel
from tests.models import tiny


def test_render_is_the_template_token_for_token() -> None:
    policy = tiny.policy()
    ids = policy.render([{"role": "user", "content": "hi"}])
    assert policy.tokenizer.convert_ids_to_tokens(ids) == [
        "<start>", *"user\nhi", "<eos>", "<start>", *"assistant\n",
    ]  # fmt: skip
    whole = policy.render([{"role": "user", "content": "hi"}], add_generation_prompt=False)
    assert whole == ids[: len(whole)]
    assert len(ids) - len(whole) == len("assistant\n") + 1
    assert all(isinstance(i, int) for i in ids)


def test_decode_leaves_special_tokens_out() -> None:
    policy = tiny.policy()
    assert policy.decode([*policy.encode("a  b."), 1, 0]) == "a  b."


def test_no_chat_template_is_an_error_with_the_way_out() -> None:
    policy = tiny.policy(template=None)
    with pytest.raises(EarnestError, match=r"no chat template.*policy\.encode"):
        policy.render([{"role": "user", "content": "hi"}])
    assert policy.decode(policy.encode("hi")) == "hi"


def test_no_messages_is_an_error() -> None:
    with pytest.raises(EarnestError, match="no messages"):
        tiny.policy().render([])


def test_eos_ids_are_all_that_end_a_turn() -> None:
    policy = tiny.policy()
    assert policy.eos_ids == {1}
    policy = tiny.policy()
    policy.model.generation_config.eos_token_id = [1, 7, 9]
    assert policy.eos_ids == {1, 7, 9}
    policy = tiny.policy()
    policy.model.generation_config.eos_token_id = 7
    assert policy.eos_ids == {1, 7}


@pytest.mark.parametrize(("pad", "want"), [("<pad>", 0), ("<eos>", 1), (None, 1)])
def test_pad_may_be_eos_or_missing(pad: str | None, want: int) -> None:
    assert tiny.policy(pad=pad).pad_id == want


def test_a_wrapped_model_is_frozen_and_in_eval_mode() -> None:
    model = tiny.model().train()
    assert any(p.requires_grad for p in model.parameters())
    policy = tiny.Policy.of(model, tiny.tokenizer())
    assert not any(p.requires_grad for p in policy.model.parameters())
    assert not any(m.training for m in policy.model.modules())


def test_hidden_with_a_left_padded_row_is_the_row_alone() -> None:
    policy = tiny.policy()
    ids = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]])
    with torch.no_grad():
        both = policy.hidden(ids, attention_mask=mask, position_ids=positions)
        assert torch.allclose(both[:1, 2:], policy.hidden(ids[:1, 2:]), atol=1e-5)
        assert torch.allclose(both[1:], policy.hidden(ids[1:]), atol=1e-5)


def test_an_argument_that_the_architecture_does_not_take_is_refused() -> None:
    with pytest.raises(UnusableModel, match="takes no position_ids"):
        tiny.policy("bloom").hidden(torch.tensor([[3, 4]]), position_ids=torch.tensor([[0, 1]]))


class TestFingerprint:
    def test_same_weights_same_print_and_one_bit_changes_it(self) -> None:
        policy, twin = tiny.policy(), tiny.policy()
        first = policy.fingerprint()
        assert len(first) == 64
        assert first == twin.fingerprint() == policy.fingerprint()
        weight = policy.model.model.layers[1].mlp.down_proj.weight
        with torch.no_grad():
            weight.view(torch.int32)[3, 4] ^= 1  # the last bit of one number
        assert policy.fingerprint() == first  # cached
        assert policy.fingerprint(fresh=True) != first

    def test_dtype_name_and_shape_count(self) -> None:
        prints = {tiny.policy().fingerprint()}
        prints.add(tiny.Policy.of(tiny.model().to(torch.bfloat16), tiny.tokenizer()).fingerprint())
        prints.add(tiny.policy("llama_untied").fingerprint())
        prints.add(tiny.policy(seed=1).fingerprint())
        assert len(prints) == 4

    def test_an_adapters_tensors_are_not_in_the_fingerprint(self) -> None:
        policy, layer = tiny.policy(), "model.layers.0.mlp.up_proj"
        policy.model.get_submodule(layer).register_parameter("lora_a", nn.Parameter(torch.ones(3)))
        policy.model.get_submodule(layer).register_module("lora_b", nn.Linear(2, 2))
        assert policy.fingerprint() == tiny.policy().fingerprint()

    def test_a_base_tensor_missing_from_the_model_is_an_error(self) -> None:
        policy = tiny.policy()
        policy.model.model.layers[0].mlp.up_proj = nn.Identity()
        with pytest.raises(UnusableModel, match=r"model\.layers\.0\.mlp\.up_proj\.weight is no longer in the model"):
            policy.fingerprint()


def test_describe_names_weights_size_precision_and_place() -> None:
    policy = tiny.policy()
    line = policy.describe()
    for part in ("tiny llama", "unversioned", "LlamaForCausalLM", "0.02 M parameters", "float32 on cpu"):
        assert part in line
    assert policy.parameters == sum(p.numel() for p in policy.model.parameters())
