"""The conformance table as one parametrised test; test_mutants.py shows that it finds broken variants."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest

from earnest.adapters import conformance, kernel
from earnest.adapters.conformance import CHECKS, DTYPES, MODELS, SUBJECTS, Case
from earnest.adapters.errors import AdapterError
from earnest.adapters.variant import VARIANTS, get_variant
from tests.adapters.compile_worker import HALF, MUTANTS

# On nano (the largest of the three) the checks that a bigger, trained model could fail where the tiny ones do not.
NANO_CHECKS = ("identity", "gradients", "merging")


PLACES = {
    "ffn": ("llama", ["gate_proj", "up_proj", "down_proj"]),
    "tied head": ("llama", ["lm_head"]),
    "ffn with biases": ("gpt2", ["c_fc", "mlp.c_proj"]),
}


def subject(label: str):
    name, settings = SUBJECTS[label]
    return get_variant(name, **settings)


FIRST = list({name: label for label, (name, _) in reversed(SUBJECTS.items())}.values())
"""One label of each variant."""
REST = [label for label in SUBJECTS if label not in FIRST]
COMPILED = [label for label in FIRST if label not in ("eva", "dora")]
"""EVA's forward is LoRA's, and the whole model that is compiled has DoRA."""


def nightly(label: str, model: str = "llama", dtype: str = "fp32") -> bool:
    """`make test` has every label on Llama in fp32, and one label of each variant on GPT-2 or in bf16. fp16 differs
    from bf16 by its range only: it has one case. The layout of GPT-2's layers has nothing to do with the dtype."""
    return (
        (label in REST and (model, dtype) != ("llama", "fp32"))
        or (dtype == "fp16" and label != "lora")
        or (model == "gpt2" and dtype != "fp32")
    )


def cases(*places: tuple[str, ...]) -> list[Any]:
    """Every label at every place; those that are nightly are marked."""
    found = [(label, *place) for label in SUBJECTS for place in places]
    return [pytest.param(*case, marks=[pytest.mark.slow] if nightly(*case) else []) for case in found]


@pytest.mark.parametrize(("label", "model", "dtype"), cases(*itertools.product(("llama", "gpt2"), DTYPES)))
def test_table(label: str, model: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if model == "llama":
        monkeypatch.setattr(kernel, "SMALL", 0)  # use the kernels' own backward, as with many tokens
    case = Case(subject(label), MODELS[model], DTYPES[dtype])
    for check in CHECKS.values():
        check(case)


@pytest.mark.parametrize("label", FIRST)
def test_table_on_nano(label: str) -> None:
    case = Case(subject(label), MODELS["nano"], DTYPES["fp32"])
    for name in NANO_CHECKS:
        CHECKS[name](case)


@pytest.mark.slow
@pytest.mark.parametrize("label", SUBJECTS)
def test_table_on_nano_in_full(label: str) -> None:
    for dtype in DTYPES.values():
        case = Case(subject(label), MODELS["nano"], dtype)
        for check in CHECKS.values():
            check(case)


def compile_all(labels: Iterable[str]) -> dict[str, str]:
    """Label -> the error with fullgraph=True, or ""; one process for all of them."""
    command = [sys.executable, "-m", "tests.adapters.compile_worker", *labels]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def compiled() -> dict[str, str]:
    return compile_all([*COMPILED, "whole model", *HALF, *MUTANTS])


@pytest.mark.parametrize("label", [*COMPILED, "whole model", *HALF])
def test_compiles_into_one_graph(label: str, compiled: dict[str, str]) -> None:
    assert compiled[label] == ""


@pytest.mark.slow
def test_other_settings_compile_into_one_graph() -> None:
    others = [label for label in SUBJECTS if label not in COMPILED]
    assert compile_all(others) == dict.fromkeys(others, "")


@pytest.mark.parametrize(
    ("label", "message"),
    [("breaks the graph", "Broken: does not compile into one graph"), ("differs when compiled", "Broken: compiled")],
)
def test_variants_that_do_not_compile_fail_the_check(label: str, message: str, compiled: dict[str, str]) -> None:
    assert compiled[label].startswith(message)


@pytest.mark.parametrize(
    ("label", "where"),
    [
        pytest.param(label, where, marks=[pytest.mark.slow] if label in REST or where == "ffn with biases" else [])
        for label in SUBJECTS
        for where in PLACES
    ],
)
def test_on_other_layers(label: str, where: str) -> None:
    """The feed-forward layers (other shapes, several kinds), and a head that is tied to the embedding."""
    model, targets = PLACES[where]
    if label == "full" and where == "tied head":
        with pytest.raises(AdapterError, match="tied"):  # the head's weight is the embedding's: both, or neither
            CHECKS["identity"](Case(subject(label), MODELS[model], targets=targets))
        return
    case = Case(subject(label), MODELS[model], targets=targets)
    for name in ("identity", "gradients", "merging", "saving", "detaching"):
        CHECKS[name](case)


def test_the_slow_check_is_part_of_the_table_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Case] = []
    monkeypatch.setitem(conformance.SLOW_CHECKS, "compiling", asked.append)
    settings = {"models": ["llama", "gpt2"], "dtypes": ["fp32", "bf16"]}
    monkeypatch.setattr(conformance, "CHECKS", {"identity": CHECKS["identity"]})
    list(conformance.run(["lora"], **settings))
    assert not asked
    list(conformance.run(["lora", "ia3"], compile=True, **settings))
    assert len(asked) == 2, "once a variant"


def test_every_variant_has_a_row() -> None:
    assert {name for name, _ in SUBJECTS.values()} == {
        n for n, c in VARIANTS.items() if c.__module__.startswith("earnest")
    }


def test_a_row_has_a_cell_for_every_column_and_says_ok() -> None:
    rows = list(conformance.run(["ia3", "lora"], models=["llama"], dtypes=["fp32"]))
    assert [r.verdict for r in rows] == ["ok", "ok"]
    lora = ("lora", "peft LoraConfig", "896", "bit-exact", "all but A", "fp32", "low-rank", "ok")
    assert conformance.cells(rows[1]) == lora and len(conformance.COLUMNS) == len(lora)
