"""``engine.compile``: the compiled layers give the eager gradient, and a failure is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import earnest as en
from earnest.adapters.conformance import perturb, tiny_llama
from earnest.config import from_mapping, recipes
from earnest.engines.compiling import CompiledLayers
from earnest.errors import ConfigError
from tests.engines.words import word_tokenizer


def engine(monkeypatch: pytest.MonkeyPatch, backend: Any, **settings: Any) -> en.LocalEngine:
    monkeypatch.setattr("earnest.engines.local.CompiledLayers", lambda body: CompiledLayers(body, backend))
    policy = en.Policy.of(tiny_llama(), word_tokenizer(64))
    adapter = en.attach(policy, en.LoRA(rank=4), targets="all-linear")
    perturb(adapter)
    return en.LocalEngine(policy, adapter, micro_tokens=16, **settings)


def batch() -> en.Batch:
    rows = [([5, 6, 7], [10, 11]), ([8, 9], [12, 13, 14]), ([3], [4] * 9)]
    return en.Batch.from_rows([p for p, _ in rows], [c for _, c in rows], role="demonstration")


def gradient(engine: en.LocalEngine) -> dict[str, torch.Tensor]:
    return engine.gradients(batch(), en.SFT())


@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_layers_give_the_eager_gradient(monkeypatch: pytest.MonkeyPatch, checkpointed: bool) -> None:
    calls: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        calls.append(len(inputs))
        return graph

    want = gradient(engine(monkeypatch, backend))
    made = engine(monkeypatch, backend, compile=True, checkpoint_activations=checkpointed)
    got = gradient(made)
    assert calls, "something was compiled"
    assert all(torch.allclose(got[n], g, rtol=1e-5, atol=1e-7) and bool(g.any()) for n, g in want.items())
    report = made.step(batch(), en.SFT())
    assert report.layout.endswith(", compiled")
    assert len(made.sample([[5, 6]], 2, en.SampleSpec(max_new_tokens=2))) == 2


def test_a_failure_is_named_and_the_step_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no C++ compiler here")

    want = gradient(engine(monkeypatch, broken))
    made = engine(monkeypatch, broken, compile=True)
    got = gradient(made)
    assert all(torch.equal(got[n], g) for n, g in want.items())
    layout = made.step(batch(), en.SFT()).layout
    assert "not compiled (" in layout and "no C++ compiler here" in layout
    assert "layers run uncompiled" in caplog.text


@pytest.mark.slow
def test_inductor_gives_the_eager_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    want = gradient(engine(monkeypatch, "inductor"))
    made = engine(monkeypatch, "inductor", compile=True)
    got = gradient(made)
    assert made.compiled is not None and made.compiled.reason is None
    assert all(torch.allclose(got[n], g, rtol=1e-4, atol=1e-6) for n, g in want.items())


def test_compiling_shards_is_refused() -> None:
    with pytest.raises(ConfigError, match="not tested with shards"):
        from_mapping(recipes.read("quickstart")[1], ["engine.compile=true", "engine.shard=2"])
