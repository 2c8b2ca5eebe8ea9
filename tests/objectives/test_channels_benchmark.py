"""The end-to-end benchmark's arithmetic: steps to a target, the table, and the JSON it is made from."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.channels import ARMS, Result, main, table
from earnest.objectives import build_objective


def results() -> list[Result]:
    curve = ((0, 0.3), (2, 0.5), (4, 0.9))
    return [
        Result("GRPO", 0, curve, 0.2, None, {}, 1.0),
        Result("GRPO", 1, ((0, 0.3), (2, 0.85), (4, 0.7)), 0.4, None, {}, 1.0),
        Result("SDPO", 0, ((0, 0.3), (4, 0.4)), 0.1, None, {"sdpo": 2}, 1.0),
        Result("GRPO + barrier", 0, curve, 0.1, 0.25, {}, 1.0),
    ]


def test_the_table_marks_targets_that_were_not_reached() -> None:
    lines = table(results(), 0.8).splitlines()
    assert lines[2] == "| GRPO | 3.0 ± 1.4 | 0.300 ± 0.000 | 0.800 ± 0.141 | 0.300 ± 0.141 |  |"
    assert lines[3] == "| SDPO | never | 0.300 | 0.400 | 0.100 |  |"
    assert lines[4] == "| GRPO + barrier | 4.0 | 0.300 | 0.900 | 0.100 | 25% of steps |"
    assert "1 of 2 seeds" in table(results()[:2], 0.87).splitlines()[2]


def test_an_earlier_run_prints_the_same_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "channels.json"
    path.write_text(json.dumps({"target": 0.8, "results": [asdict(r) for r in results()]}))
    assert main(["--from", str(path)]) == 0
    assert capsys.readouterr().out.strip() == table(results(), 0.8)


def test_every_arm_is_an_objective_and_has_its_barrier() -> None:
    assert len(ARMS) == 8
    for name, terms in ARMS.items():
        kinds = [w.term.kind for w in build_objective(terms).terms]
        assert ("kl_barrier" in kinds) == ("barrier" in name) and ("simpo" in kinds) == ("SimPO" in name)
