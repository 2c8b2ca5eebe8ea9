"""What depends on the device, on a real GPU: `make gpu` runs these and writes what it finds into one JSON file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import earnest as en
from earnest.engines import LogProbsWanted

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; `make gpu` runs these tests")
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.empty_cache()


def engine(device: str, dtype: Any = "float32", **settings: Any) -> en.LocalEngine:
    policy = en.load("nano", device=device, dtype=dtype)
    return en.LocalEngine(policy, en.attach(policy, en.LoRA(rank=4), targets="all-linear"), **settings)


def batch() -> en.Batch:
    g = torch.Generator().manual_seed(0)

    def tokens(n: int) -> list[int]:
        return torch.randint(3, 500, (n,), generator=g).tolist()

    prompts = [tokens(12) for _ in range(4)]
    return en.Batch.from_rows(
        [p for p in prompts for _ in range(4)], [tokens(4 + i) for i in range(16)], role="demonstration"
    )


def apart(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    pairs = [(one[n].float().cpu(), g.float().cpu()) for n, g in two.items()]
    return max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs if b.any())


def test_the_gradient_is_the_cpus() -> None:
    found = [engine(device).gradients(batch(), en.SFT()) for device in ("cuda", "cpu")]
    assert apart(*found) < 1e-3


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_packed_rows_give_the_padded_gradient(attention: Any) -> None:
    packed, padded = engine("cuda", pack=True, packed_attention=attention), engine("cuda", pack=False)
    assert apart(packed.gradients(batch(), en.SFT()), padded.gradients(batch(), en.SFT())) < 1e-3
    name = "flex_attention" if attention == "flex" else "masked sdpa"
    assert packed.step(batch(), en.SFT()).layout == f"packed ({name})"


@pytest.mark.parametrize("settings", [{"checkpoint_activations": True}, {"compile": True}], ids=["again", "compiled"])
def test_settings_for_memory_and_speed_leave_the_gradient(settings: dict[str, bool]) -> None:
    made = engine("cuda", **settings)
    assert apart(made.gradients(batch(), en.SFT()), engine("cuda").gradients(batch(), en.SFT())) < 1e-3
    assert "not compiled" not in made.step(batch(), en.SFT()).layout


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "nf4"])
def test_samples_have_the_log_probs_of_scoring(dtype: str) -> None:
    made = engine("cuda", dtype)
    made.step(batch(), en.SFT())
    rollouts = made.sample([[5, 6, 7], [8, 9]], 4, en.SampleSpec(max_new_tokens=8))
    rows = en.Batch.from_rows([r.prompt for r in rollouts], [r.tokens for r in rollouts])
    behaviour = torch.tensor([lp for r in rollouts for lp in r.logprobs])
    scored = made.score(rows, LogProbsWanted())
    assert isinstance(scored, torch.Tensor)
    torch.testing.assert_close(behaviour, scored.cpu(), rtol=0, atol=0.05 if dtype == "bfloat16" else 1e-3)


def test_a_run_checks_itself() -> None:
    made = engine("cuda")
    assert en.prove(made, en.SFT(), batch(), quick=True).holds


def test_memory_is_as_planned() -> None:
    """The allocator's peak on the GPU against `earnest plan`."""
    from benchmarks.plan import config_of
    from earnest.plan import Device, plan

    config = config_of("nano, LoRA", None)
    total = torch.cuda.get_device_properties(0).total_memory
    found = plan(config, Device("gpu", total), tokens=96)
    policy = en.load("nano", device="cuda", dtype="float32")
    adapter = en.attach(policy, config.adapter.build(), config.adapter.targets)
    made = en.LocalEngine(policy, adapter, micro_tokens=config.micro_tokens)
    work = found.work
    rows = work.batch(work.groups, policy.head.weight.shape[0]).with_signals(
        advantages=torch.linspace(-1, 1, work.rows * work.completion),
        behaviour=torch.full((work.rows * work.completion,), -1.0),
    )
    made.step(rows, config.build_objective())
    torch.cuda.reset_peak_memory_stats()
    made.step(rows, config.build_objective())
    assert found.memory.peaks["train"] == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.15)
