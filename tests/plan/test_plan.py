"""`earnest plan`: predicted memory against measured memory, and what it recommends."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from benchmarks.plan import BILLION, case
from earnest import cli
from earnest.adapters import VARIANTS, attach
from earnest.commands.planning import _device, _show
from earnest.config import from_mapping, recipes
from earnest.errors import ConfigError
from earnest.models.loading import load
from earnest.plan import Device, Memory, MemoryPlan, plan
from earnest.plan import shape as shapes
from earnest.plan.advice import _options, largest
from earnest.plan.memory import memory, optimizer_bytes, parse_bytes, vocabulary_bytes
from earnest.plan.paper import paper
from earnest.plan.shape import PassSize, Shape, bytes_of
from earnest.plan.workload import Workload, workload

CLOSE = 0.15


def config(*overrides: str) -> Any:
    return from_mapping(recipes.read("quickstart")[1], list(overrides))


@cache
def planned(*overrides: str, count: int = 1) -> MemoryPlan:
    return plan(config(*overrides), Device("gpu", 80 * 10**9, count), tokens=32)


SHARDED = ("engine.shard=2", "sampling.workers=1")


def close(found: dict[str, Any]) -> None:
    for moment in ("train", "sample"):
        sizes = found[moment]
        assert sizes["predicted"] == pytest.approx(sizes["measured"], rel=CLOSE), (moment, sizes)


def test_nano_is_predicted_as_measured() -> None:
    close(case("nano, LoRA"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nano, checkpointed", "nano, full", "smollm2, LoRA", "smollm2, checkpointed"])
def test_small_models_are_predicted_as_measured(name: str) -> None:
    close(case(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1B, LoRA", "1B, bfloat16"])
def test_a_random_1b_is_predicted_as_measured(name: str) -> None:
    close(case(name))


def small(layers: int) -> Any:
    wanted = BILLION | {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "vocab_size": 128}
    return AutoConfig.for_model(**(wanted | {"num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": layers}))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_layers_that_are_left_out_are_counted(monkeypatch: pytest.MonkeyPatch, checkpointed: bool) -> None:
    """7 layers: extrapolated from 2 and 3, and run whole."""
    made = Shape(small(7), torch.float32, config().adapter)
    sizes = [PassSize(3, 40)]
    few = made.trace(sizes, 60, checkpointed=checkpointed, again=True)
    cache = made.cache_bytes()
    monkeypatch.setattr(shapes, "FEW", 100)
    whole = made.trace(sizes, 60, checkpointed=checkpointed, again=True)
    assert few.kept == whole.kept > 0
    assert few.peak == pytest.approx(whole.peak, rel=0.01)
    assert cache == made.cache_bytes() == 7 * 2 * 2 * 32 * 4
    assert (made.trace(sizes, 60, again=True) == whole) == (not checkpointed), "not checkpointed by default"


LABELS = sorted(n for c in VARIANTS.values() for n, s in c.examples.items() if "kind" not in s)


@pytest.mark.parametrize("label", LABELS)
def test_every_adapter_has_its_size_without_values(label: str) -> None:
    name, settings = next((n, c.examples[label]) for n, c in VARIANTS.items() if label in c.examples)
    given = config(f"adapter={json.dumps({'kind': name, 'targets': None} | dict(settings))}").adapter
    made = Shape(small(2), torch.float32, given)
    real = {n: tuple(t.shape) for n, t in made.adapter.named_tensors().items()}
    policy = load("nano")
    calibration = [torch.arange(8)[None]] if given.build().wants_calibration() else None
    other = attach(policy, given.build(), calibration=calibration)
    assert {n.rsplit(".", 1)[-1] for n in real} == {n.rsplit(".", 1)[-1] for n in other.named_tensors()}
    assert bytes_of(made.adapter.parameters()) > 0
    traced = made.trace([PassSize(2, 16)], 8)
    assert traced.peak >= traced.kept > 0


def test_optimizers_by_the_state_they_keep() -> None:
    def state(kind: str) -> float:
        return optimizer_bytes(config(f"optimizer={{{kind}}}").optimizer.build())

    assert [state(k) for k in ("kind: adamw", "kind: sgd", "kind: sgd, momentum: 0.9")] == [8, 0, 4]
    assert state("kind: adamw8bit") == pytest.approx(2, rel=0.05)


@pytest.fixture(scope="module")
def seventy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 70B model: a folder with a config.json and nothing else."""
    folder = tmp_path_factory.mktemp("70B")
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    big = BILLION | sizes | {"head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": False, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(big))
    return folder


def test_a_70b_from_its_config_alone(seventy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(seventy), "--gpu", "80GB", "--count", "8", "--tokens", "1024", "--json", "sampling.workers=1"]
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    found = json.loads(capsys.readouterr().out)
    assert ended.value.code == 1 and not found["fits"] and found["largest_rows"] == 0
    assert found["parameters"] == pytest.approx(70.5e9, rel=0.02)
    assert found["memory"]["moments"]["train"]["weights"] == pytest.approx(141e9, rel=0.02)
    settings = [" ".join(c["settings"]) for c in found["changes"]]
    assert settings[-1] == "engine.shard=8 engine.replicate=1" and found["changes"][-1]["fits"]
    assert settings.index("engine.checkpoint_activations=true") < settings.index(settings[-1])
    peaks = [c["peak"] for c in found["changes"]]
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < 80e9


def test_shards_need_less_and_send_more() -> None:
    one, two = planned(), planned(*SHARDED, count=2)
    assert two.memory.moments["train"]["weights"] == pytest.approx(one.memory.moments["train"]["weights"] / 2, rel=0.01)
    assert one.paper.sent == 0 < two.paper.sent and one.fits and not one.changes
    assert two.paper.operations == pytest.approx(one.paper.operations / 2, rel=0.1)


@pytest.mark.parametrize("adapter", [(), ("adapter={kind: full}",)], ids=["lora", "full"])
def test_an_offloaded_base_is_not_on_the_device(adapter: tuple[str, ...]) -> None:
    two, away = (planned(*adapter, *SHARDED, *more, count=2).memory.moments for more in ((), ("engine.offload=true",)))
    assert two["train"]["weights"] > 0 and "weights" not in away["train"]
    assert away["train"]["gathered weights"] == two["train"]["gathered weights"]
    trained = [sum(m["update"].get(p, 0) for p in ("adapter", "optimizer", "gradients")) for m in (two, away)]
    assert trained[1] == (0 if adapter else trained[0])


@pytest.mark.parametrize(("adapter", "trained"), [("lora", False), ("full", True)])
def test_trained_weights_are_gathered_and_cost_a_pass(adapter: str, trained: bool) -> None:
    """Passes over the weights: forward, the gradient of the activations, that of trained weights, and forward again."""
    words = f"adapter={{kind: {adapter}, targets: null}}"
    shape = Shape(small(2), torch.bfloat16, config(words).adapter)
    assert shape.policy.head.weight.dtype == torch.bfloat16, "whatever the config of the model has"
    work = Workload(groups=4, group=1, prompt=50, completion=14)
    device = Device("gpu", 10**9, 2)
    sharded = memory(shape, config(words, "engine.shard=2", "sampling.workers=1"), work, device).moments["sample"]
    whole = bytes_of(shape.weights) + (bytes_of(shape.adapter.parameters()) if trained else 0)
    assert sharded["gathered weights"] == whole
    once, again = (
        paper(shape, config(words, f"engine.checkpoint_activations={word}"), work, device).operations
        for word in ("false", "true")
    )
    assert again / once == pytest.approx(8 / 6 if trained else 6 / 4)


def test_the_largest_micro_batch_is_the_largest() -> None:
    """A run with that many rows in a micro-batch fits, and one with a tenth more does not."""
    device = Device("cpu", 80 * 10**6)
    work = Workload(groups=4, group=1, prompt=50, completion=14, samples_here=False)
    made = Shape(small(2), torch.float32, config().adapter)

    def found(rows: int) -> Memory:
        wanted = config("engine.pack=false", f"micro_tokens={rows * 63}")
        return memory(made, wanted, replace(work, groups=2 * rows), device)

    rows = largest(made, config("engine.pack=false"), work, device, found(4))
    assert rows > 40 and found(rows).peaks["train"] <= device.room < found(round(rows * 1.1)).peaks["train"]


def test_mistakes_in_the_command() -> None:
    assert [parse_bytes(t) for t in ("80GB", "24GiB", "80", "0GB", "much")] == [
        80 * 10**9,
        24 * 2**30,
        80 * 10**9,
        None,
        None,
    ]
    with pytest.raises(ConfigError, match="a service plans its own memory"):
        plan(config("engine={kind: tinker}"), Device("gpu", 10**9))
    with pytest.raises(ConfigError, match="layers that ranks share is not predicted"):
        plan(config("engine.tensor=2", "sampling.workers=1"), Device("gpu", 10**9, 2))


def test_a_folder_without_a_config_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", str(tmp_path)])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "has no config.json, so it is not a model folder" in said and said.count("\n") == 1


def test_the_rows_that_are_decoded_together() -> None:
    """Those of training or of the evaluation, whichever are more; not those with more prompts."""
    work = Workload(groups=10, group=1, prompt=4, completion=4, evaluated=(4, 8))
    assert work.sampled(256, 1) == (32, 4) and work.sampled(256, 4) == (8, 1) and work.sampled(3, 1) == (3, 3)
    assert [len(replace(work, group=n).batch(3)) for n in (1, 2)] == [3, 6], "the rows of three prompts"


def test_the_lengths_of_rows(tmp_path: Path, seventy: Path) -> None:
    def found(tokens: int | None, *overrides: str) -> Workload:
        return workload(config(*overrides), tokens, lambda _: None)

    assert (found(8).prompt, found(8).completion) == (1, 7) and found(100).row_tokens == 100
    measured = found(None, "sampling.max_new_tokens=9")
    assert measured.completion == 9 and 1 < measured.prompt < 100
    assert found(None, f"model={seventy}").lengths_from == "assumed: there is no tokenizer"
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"say {i}", "completion": "yes"}) + "\n" for i in range(8)))
    given = {"model": "nano", "adapter": {"kind": "lora"}, "objective": [{"kind": "sft"}], "steps": 1}
    own = workload(from_mapping(given | {"data": {"train": str(rows)}}), None, lambda _: None)
    assert own.prompt == 1 and 4 < own.completion < 40 and own.evaluated == (0, 0)


def test_a_change_without_an_effect_is_not_offered() -> None:
    work = Workload(groups=4, group=1, prompt=50, completion=14)

    def offered(key: str, word: str) -> dict[str, object]:
        found = _options(config(f"{key}={word}"), work, Device("gpu", 10**9))
        return next(settings if effective else {} for effective, settings, _ in found if key in settings)

    assert offered("micro_tokens", "65") == {"micro_tokens": 64}
    assert offered("micro_tokens", "64") == {}
    for word, settings in (("false", {"engine.checkpoint_activations": True}), ("true", {})):
        assert offered("engine.checkpoint_activations", word) == settings


def test_a_teachers_states_are_part_of_the_vocabularys_memory() -> None:
    shape = Shape(small(2), torch.float32, config().adapter)
    device, tokens = Device("gpu", 10**9), 1000
    plain, taught = (
        vocabulary_bytes(shape, config(f"objective=[{{kind: {kind}}}]").build_objective(), tokens, device)
        for kind in ("entropy", "sdpo")
    )
    row, width = shape.vocabulary * 4, shape.width * 4
    assert plain == 2 * tokens * (width + row), "states and logits, each with its derivative"
    assert taught - plain == tokens * width + tokens * row, "their states, and one more block of logits"


def test_packed_weights_are_part_of_the_memory_of_sampling_on_a_cpu() -> None:
    """In float32, for completions that are long enough to pay for them."""
    wide = AutoConfig.for_model(**(small(1).to_dict() | {"intermediate_size": 4096}))
    for dtype, kind, completion, layers in (
        (torch.float32, "cpu", 32, 3),
        (torch.float32, "cpu", 8, 0),
        (torch.float32, "gpu", 32, 0),
        (torch.bfloat16, "cpu", 32, 0),
    ):
        work = Workload(groups=4, group=2, prompt=8, completion=completion)
        found = memory(Shape(wide, dtype, config().adapter), config(), work, Device(kind, 10**9))
        assert found.moments["sample"].get("packed weights", 0) == layers * 4 * 64 * 4096


def test_the_command_passes_on_what_it_is_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = replace(planned(), device=Device("gpu", 24 * 10**9, 3))
    seen: dict[str, Any] = {}

    def predict(wanted: Any, device: Device, **given: Any) -> MemoryPlan:
        seen.update(given, device=device)
        return replace(found, device=device)

    monkeypatch.setattr("earnest.plan.plan", predict)
    with pytest.raises(SystemExit):
        cli.main(["plan", "quickstart", "--gpu", "24GB", "--tokens", "32", "--tflops", "3", "--link", "7GB"])
    assert seen["device"] == Device("gpu", 24 * 10**9) and (seen["tokens"], seen["tflops"]) == (32, 3.0)
    assert seen["link"] == 7e9 and "stay idle" not in capsys.readouterr().out
    _show(found)
    shown = capsys.readouterr().out
    assert "2 of 3 devices stay idle" in shown and "memory per device" in shown
    here = _device(None, 2)
    assert (here.kind == "cpu") == (not torch.cuda.is_available()) and here.bytes > 10**8 and here.count == 2
