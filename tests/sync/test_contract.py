"""The contract of a sampling server on a real `earnest serve`; six planted faults are each named, and stop a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from earnest.adapters import LoRA, attach
from earnest.cli import app
from earnest.config import from_mapping
from earnest.engines import LocalEngine
from earnest.errors import EarnestError
from earnest.models import load
from earnest.runs import start
from earnest.runs.errors import RunStopped
from earnest.sync.contract import LAWS, audit_sampler
from earnest.sync.server import Server
from tests.sync.faults import FAULTS
from tests.sync.served import proxied, served, speak

RECIPE = {
    "model": "nano",
    "task": "sort",
    "adapter": {"kind": "lora", "rank": 4},
    "objective": [{"kind": "grpo"}],
    "sampling": {"prompts_per_step": 4, "completions_per_prompt": 4, "max_new_tokens": 6, "temperature": 0.7},
    "optimizer": {"kind": "adamw", "lr": 1e-2},
    "eval": {"every": 0, "prompts": 1, "samples": 1},
    "check": False,
    "steps": 3,
    "threads": 1,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("contract") / "data") as url:
        yield url


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    policy = load("nano")
    return LocalEngine(policy, attach(policy, LoRA(rank=4), targets=["q_proj", "v_proj"]))


def test_a_right_server_keeps_every_law_and_is_left_as_it_was(server: str) -> None:
    """Through the command line: a table's rows as JSON, exit code 0, nothing left on the server."""
    found = CliRunner().invoke(app, ["audit", "sampler", server, "--json"])
    verdict = json.loads(found.stdout)
    assert found.exit_code == 0 and verdict["holds"], verdict
    assert {f["outcome"] for f in verdict["findings"]} == {"holds"}
    assert {f["law"] for f in verdict["findings"]} == {*LAWS, "reused name", "base isolation"}
    assert not [m for m in Server(server).models() if str(m["id"]).startswith("earnest-")]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_contract_names_a_planted_fault(fault: str, server: str, engine: LocalEngine) -> None:
    plant, law, _ = FAULTS[fault]
    kept = engine.adapter.state_dict()
    with proxied(server) as proxy:
        plant(proxy)
        found = audit_sampler(Server(proxy.url), engine, laws=(law,))
        proxy.before = lambda path, body: (path, body)
    assert [f.law for f in found.failures] == [law] and not found.holds, str(found)
    assert all(torch.equal(a, kept[name]) for name, a in engine.adapter.state_dict().items())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_stops_a_run_with_its_name(fault: str, server: str, tmp_path: Path) -> None:
    """At once: no step is trained on what such a server sampled with other weights than the trainer's."""
    plant, _, sentence = FAULTS[fault]
    with proxied(server) as proxy:
        plant(proxy)
        config = from_mapping({**RECIPE, "sampler": proxy.url, "out": str(tmp_path / "run")})
        with pytest.raises(RunStopped, match=sentence):
            start("planted", config)
        proxy.before = lambda path, body: (path, body)
    done = json.loads((tmp_path / "run" / "run.json").read_text())["steps_done"]
    needs_an_update = fault in ("dropped push", "old KV cache", "base model")
    assert done == (1 if needs_an_update else 0)


def test_a_server_that_takes_no_adapters_is_not_passed_for_them(server: str, engine: LocalEngine) -> None:
    with proxied(server) as proxy:
        speak(proxy, "somebody")
        found = audit_sampler(Server(proxy.url), engine, laws=("log-probs", "adapter"))
    assert [f.outcome for f in found.findings] == ["holds", "not declared"]
    with pytest.raises(EarnestError, match="is not a law of the contract"):
        audit_sampler(Server(server), engine, laws=("log probs",))


def test_the_command_needs_an_address() -> None:
    found = CliRunner().invoke(app, ["audit", "sampler"])
    assert found.exit_code != 0 and "give the address of the server" in str(found.exception)
