"""earnest's own recipes with their steps on a Tinker service."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel

import earnest as en
from earnest.config import RunConfig
from earnest.errors import ConfigError
from earnest.runs import remote
from earnest.runs.lifecycle import check, resume, start
from earnest.runs.setup import build
from tests.tinker.conftest import KEY, Served


def _config(served: Served, out: Path, **more: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "task": "sort",
            "adapter": {"kind": "lora", "rank": 4, "alpha": 32.0},
            "objective": [{"kind": "grpo"}],
            "engine": {"kind": "tinker", "base_url": served.url},
            "optimizer": {"lr": 1e-3},
            "sampling": {"prompts_per_step": 2, "completions_per_prompt": 4, "max_new_tokens": 6},
            "eval": {"prompts": 4, "samples": 1, "every": 0},
            "checkpoint": {"every": 1},
            "steps": 2,
            "check": False,
            "shares_every": 0,
            "out": str(out),
            **more,
        }
    )


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)


SDPO = {"kind": "sdpo", "alpha": 0.5, "support": "student", "top_k": 12}


@pytest.mark.parametrize(
    ("more", "ran"),
    [
        ({"objective": [{"kind": "grpo"}, {"kind": "reference_kl", "weight": 0.1}], "updates_per_batch": 2}, "clip"),
        ({"objective": [SDPO], "teacher": {"kind": "ema", "mix": 0.5}}, "(N,K) weights"),
        ({"objective": [{"kind": "sdpo", "alpha": 1.0, "support": "full"}], "sampled": True}, "sampled reverse_kl"),
    ],
    ids=["grpo and a kl", "sdpo from an average", "scalar kl"],
)
def test_a_recipe_trains_on_a_service(served: Served, tmp_path: Path, more: dict[str, Any], ran: str) -> None:
    torch.manual_seed(0)
    if more.pop("sampled", False):
        more["engine"] = {"kind": "tinker", "base_url": served.url, "estimator": "sampled"}
    finished = start("remote", _config(served, tmp_path / "run", **more))
    lines = [json.loads(line) for line in (finished.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert len(steps) == 2
    assert ran in json.dumps(steps, ensure_ascii=False)
    kept = json.loads((finished.adapter / "tinker.json").read_text())
    assert kept["path"].startswith("tinker://") and "/sampler_weights/" in kept["path"]
    assert finished.report.exists()


def test_a_run_resumes_from_what_the_service_kept(served: Served, tmp_path: Path) -> None:
    start("remote", _config(served, tmp_path / "run", steps=1))
    finished = resume(tmp_path / "run", ["steps=2"])
    lines = [json.loads(line) for line in (finished.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2]


# Every key of a run. A value and a sentence: refused. A value alone: obeyed, by the engine or by the loop around it.
SDPOS = [SDPO, {**SDPO, "name": "two", "top_k": 5}]
KEYS: dict[str, list[tuple[Any, ...]]] = {
    "description": [("a recipe",)],
    "import": [(["json"],)],
    "model": [("nano",)],
    "device": [("cpu", "device: with engine.kind tinker")],
    "dtype": [("bfloat16", "dtype: with engine.kind tinker")],
    "threads": [(1,)],
    "adapter.kind": [("dora", "trains a LoRA"), ("lora",)],
    "adapter.targets": [("q_proj", "without targets")],
    "adapter.layers": [([0], "without targets, layers and")],
    "adapter.modules_to_save": [(["lm_head"], "modules_to_save")],
    "adapter.rank": [(3,)],
    "adapter.alpha": [(16.0, "alpha 32")],
    "adapter.rslora": [(True, "nothing else to set")],
    "adapter.freeze_a": [(True, "nothing else to set")],
    "chat_template": [("{{ messages }}", "chat_template: with engine.kind tinker")],
    "task": [("sort",), ({"name": "sort"},)],
    "grade": [("exact", "grades the rows of a file")],
    "data": [("missing.parquet", "there is no such file or folder"), ("PAIRS", "no term reads the pairs")],
    "objective": [([SDPO],), (SDPOS, "scores once"), ([{"kind": "dpo"}],)],
    "advantages": [("leave_one_out",)],
    "teacher.kind": [("base", "no term reads the base teacher"), ("trust_region", "mixes logits"), ("live",)],
    "teacher.mix": [
        (0.5, "teacher.mix"),
        (0.02, "teacher.mix: .* window of 149", {"objective": [SDPO], "teacher": {"kind": "ema"}}),
    ],
    "teacher.model": [("nano", "has no meaning for 'live'")],
    "teacher.adapter": [("runs/a", "has no meaning for 'live'")],
    "teacher.url": [("http://127.0.0.1:1", "has no meaning for 'live'")],
    "teacher.key": [("KEY", "has no meaning for 'live'")],
    "teacher.prompt": [("feedback", "has no meaning for 'live'")],
    "on_stall": [("stop",)],
    "best": [("reward",)],
    "eval.task": [("reverse",)],
    "turns.max_turns": [(3,)],
    "turns.max_tokens": [(100,)],
    "turns.credit": [("turn",)],
    "turns.discount": [(0.9,)],
    "turns.at_once": [(8,)],
    "turns.hint": [("Try again: {hint}",), ("Try again.", "no place for the feedback")],
    "turns.teach": [("onward",)],
    "engine.pack": [(False, "engine.pack: with engine.kind tinker"), (None,)],
    "engine.packed_attention": [("sdpa", "engine.packed_attention: with engine.kind tinker"), (None,)],
    "engine.shard": [(2, "engine.shard: with engine.kind tinker"), (1,)],
    "engine.replicate": [(2, "engine.replicate: with engine.kind tinker"), (1,)],
    "engine.tensor": [(2, "engine.tensor: with engine.kind tinker"), (1,)],
    "engine.offload": [(True, "set engine.shard to 2 or more"), (False,)],
    "engine.checkpoint_activations": [(True, "engine.checkpoint_activations: with engine.kind tinker"), (False,)],
    "engine.compile": [(True, "engine.compile: with engine.kind tinker"), (False,)],
    "repeat": [(2,)],
    "guard": [({"kind": "erase", "directions": "d.safetensors"}, "guard: with engine.kind tinker")],
    "engine.kind": [("tinker",)],
    "engine.base_url": [("http://127.0.0.1:1",)],
    "engine.estimator": [("sampled",)],
    "optimizer.kind": [("sgd", "adamw")],
    "optimizer.max_grad_norm": [(0.5,), (None,)],
    "optimizer.lr": [(0.01,)],
    "optimizer.schedule": [({"kind": "cosine"},)],
    "optimizer.lr_ratio": [(4.0, "one rate for all tensors")],
    "optimizer.betas": [([0.8, 0.9],)],
    "optimizer.eps": [(1e-5,)],
    "optimizer.weight_decay": [(0.1,)],
    "sampling.prompts_per_step": [(3,)],
    "sampling.completions_per_prompt": [(3,)],
    "sampling.max_new_tokens": [(5,)],
    "sampling.temperature": [(0.7, "temperature 1")],
    "sampling.workers": [(1, "is its own cluster")],
    "sampler": [("http://127.0.0.1:1", "samples itself")],
    "updates_per_batch": [(2,)],
    "micro_tokens": [(100, "micro_tokens: with engine.kind tinker")],
    "steps": [(3,)],
    "seed": [(5,)],
    "eval.every": [(1,)],
    "eval.prompts": [(2,)],
    "eval.samples": [(2,)],
    "checkpoint.every": [(2,)],
    "checkpoint.keep": [(1,)],
    "samples.heldout": [(1,)],
    "samples.train": [(1,)],
    "max_grader_errors": [(0.5,)],
    "shares_every": [(1,), (1, "shares_every", {"objective": [{"kind": "grpo"}, {"kind": "reference_kl"}]})],
    "check": [(True, "set check: false")],
    "loggers": [(["tensorboard"],)],
    "replicas": [(2, "trains in one place")],
    "store": [("file:///tmp/x", "trains in one place")],
    "sync": [({"every": 3}, "no meaning for one replica")],
    "out": [("elsewhere",)],
}


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key by its path; those of a kinded mapping are the fields of the kind that a service has."""
    whole = {"guard", "sampler", "sync", "task"}  # refused or obeyed as they are
    for name, field in model.model_fields.items():
        inner = field.annotation
        if name == "fields":
            kind = {"adapter.": en.LoRA, "optimizer.": en.AdamW}[prefix]
            yield from (f"{prefix}{f.name}" for f in dataclasses.fields(kind))
        elif name not in whole and isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _fields(inner, f"{name}.")
        elif dataclasses.is_dataclass(inner):
            yield from (f"{name}.{f.name}" for f in dataclasses.fields(inner))
        else:
            yield f"{prefix}{field.alias or name}"


def test_the_table_has_every_key() -> None:
    assert set(_fields(RunConfig)) == set(KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_obeyed_or_refused(served: Served, tmp_path: Path, key: str) -> None:
    for value, *rest in KEYS[key]:
        said, more = (rest[0] if rest else None), (rest[1] if len(rest) > 1 else {})
        given = _config(served, tmp_path / "run", **more).model_dump(mode="python", by_alias=True)
        owner, _, name = key.rpartition(".")
        if value == "PAIRS":
            value = str(tmp_path / "pairs.jsonl")
            Path(value).write_text(json.dumps({"prompt": "Sort 31.", "chosen": "13", "rejected": "31"}) + "\n")
        (given[owner] if owner else given)[name] = value
        if key == "best":
            given["eval"]["every"] = 1  # it compares evaluations
        if key == "adapter.kind" and value != "lora":
            given["adapter"] = {"kind": value}
        if key == "optimizer.kind":
            given["optimizer"] = {"kind": value}
        if said is None:
            config = RunConfig.model_validate(given)
            remote.check(config, config.build_objective())
            continue
        with pytest.raises((ConfigError, ValueError), match=said):
            build(RunConfig.model_validate(given), lambda _: None)


def test_what_is_obeyed_arrives(served: Served, tmp_path: Path) -> None:
    """Keys that only the service can obey, read back from the engine and from the server's own adapter."""
    more: dict[str, Any] = {
        "adapter": {"kind": "lora", "rank": 3, "alpha": 32.0},
        "optimizer": {"lr": 0.01, "betas": [0.8, 0.9], "eps": 1e-5, "weight_decay": 0.1, "max_grad_norm": 0.5},
        "engine": {"kind": "tinker", "base_url": served.url, "estimator": "sampled"},
        "objective": [{"kind": "sdpo", "alpha": 1.0, "support": "full"}],
        "teacher": {"kind": "ema", "mix": 0.5},
    }
    born = []
    said: list[str] = []
    for seed in (5, 6, 5):
        setup = build(_config(served, tmp_path / "run", seed=seed, **more), said.append)
        engine: Any = setup.engine
        there = served.adapter(engine.training)
        born.append({n: p.detach().clone() for n, p in there.named_parameters().items()})
        assert there.variant == en.LoRA(rank=3, alpha=32.0)
        assert engine.optimizer_spec == en.AdamW(lr=0.01, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.1)
        assert (engine.max_grad_norm, engine.estimator, engine.outer.rate) == (0.5, "sampled", 0.5)
        engine.close()
    same = [all(torch.equal(p, other[n]) for n, p in born[0].items()) for other in born[1:]]
    assert same == [False, True]
    assert any("cannot be resumed" in line for line in said)  # said before a step is paid for


def test_a_service_is_not_audited_and_a_local_engine_has_no_address(served: Served, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set engine\.kind=local"):
        check(_config(served, tmp_path / "run"))
    with pytest.raises(ValueError, match="no meaning for a local engine"):
        _config(served, tmp_path / "run", engine={"base_url": served.url})
