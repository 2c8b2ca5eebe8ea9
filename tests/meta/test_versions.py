"""The versions that the tests vouch for are those in constraints.txt, and pyproject.toml's ranges contain them."""

from __future__ import annotations

import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import earnest
from scripts.pins import CONSTRAINTS, OWN, ROOT, closure

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins() -> dict[str, str]:
    lines = [line.strip() for line in CONSTRAINTS.read_text().splitlines()]
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


@pytest.mark.integration
def test_what_is_installed_is_what_is_pinned() -> None:
    pinned = pins()
    installed = closure("earnest", frozenset({"dev"}))
    different = {
        name: (version, pinned.get(name)) for name, version in installed.items() if pinned.get(name) != version
    }
    assert not different, f"(installed, pinned) differ; `make pins` writes what is installed: {different}"


APART = {"juicer"}
"""Extras that cannot share .venv: their pins are in envs/, held below."""


def test_extras_apart_have_an_environment_whose_pins_are_in_range() -> None:
    for name in APART:
        lines = (ROOT / "envs" / f"{name}.txt").read_text().splitlines()
        pinned = {
            canonicalize_name(r.name): r for r in map(Requirement, (x for x in lines if "==" in x and x[0] != "#"))
        }
        for need in map(Requirement, PROJECT["optional-dependencies"][name]):
            (version,) = (s.version for s in pinned[canonicalize_name(need.name)].specifier)
            assert need.specifier.contains(version), str(need)


def test_torch_is_pinned_without_a_local_part() -> None:
    assert pins()["torch"] == "2.13.0"


def test_ranges_contain_the_pins() -> None:
    pinned = pins()
    extras = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *(x for name in set(extras) - APART for x in extras[name])]
    for need in map(Requirement, lines):
        if canonicalize_name(need.name) not in OWN:
            assert need.specifier.contains(pinned[canonicalize_name(need.name)]), str(need)


def test_every_integration_is_part_of_all() -> None:
    extras = PROJECT["optional-dependencies"]
    (everything,) = extras["all"]
    assert Requirement(everything).extras == set(extras) - {"all", "test", "dev"} - APART


def test_the_version_is_in_one_place() -> None:
    assert earnest.__version__ == metadata.version("earnest") == metadata.version("earnest-audit")
