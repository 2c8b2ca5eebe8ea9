"""earnest's own recipes with their steps on a Tinker service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from earnest.config import RunConfig
from earnest.errors import ConfigError
from earnest.runs.run import check, resume, start
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


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"check": True}, "set check: false"),
        ({"shares_every": 1, "objective": [{"kind": "grpo"}, {"kind": "reference_kl"}]}, "shares_every"),
        ({"adapter": {"kind": "dora", "rank": 4}}, "trains a LoRA"),
        ({"adapter": {"kind": "lora", "rank": 4}}, "alpha 32"),
        ({"adapter": {"kind": "lora", "rank": 4, "alpha": 32.0, "targets": "q_proj"}}, "without targets"),
        ({"optimizer": {"kind": "sgd"}}, "adamw"),
        ({"micro_tokens": 100}, "micro_tokens"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"sampling": {"temperature": 0.7}}, "temperature 1"),
        ({"objective": [SDPO], "teacher": {"kind": "trust_region"}}, "mixes logits"),
        ({"teacher": {"kind": "base"}}, "teach nobody"),
        ({"objective": [SDPO, {**SDPO, "name": "two", "top_k": 5}]}, "asked once"),
    ],
)
def test_every_key_is_obeyed_or_refused(served: Served, tmp_path: Path, more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        start("remote", _config(served, tmp_path / "run", **more))


def test_a_service_is_not_audited_and_a_local_engine_has_no_address(served: Served, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="audit it with local"):
        check(_config(served, tmp_path / "run"))
    with pytest.raises(ValueError, match="no meaning for a local engine"):
        _config(served, tmp_path / "run", engine={"base_url": served.url})
