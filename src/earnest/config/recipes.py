"""Recipes by name: the YAML files of ``earnest/recipes``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module, resources
from pathlib import Path
from types import ModuleType
from typing import Any

from earnest.config import text
from earnest.config.overrides import check_spelling
from earnest.errors import ConfigError, nearest


@dataclass(frozen=True)
class Recipe:
    """A line of ``earnest recipes``."""

    name: str
    description: str
    model: str
    task: str
    objective: tuple[str, ...]
    path: Path


def _files() -> dict[str, Path]:
    folder = Path(str(resources.files("earnest") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def names() -> list[str]:
    return list(_files())


def is_recipe(text: str) -> bool:
    """Whether the text names a recipe or a YAML file, and not a run folder."""
    return text in _files() or Path(text).suffix in (".yaml", ".yml")


def list_recipes() -> list[Recipe]:
    found = []
    for name, path in _files().items():
        data = text.parse_file(path)
        kinds = tuple(term["kind"] for term in data.get("objective", ()))
        task = data.get("task", "several") if "experiment" in data else data["task"]
        task = task["name"] if isinstance(task, dict) else task
        found.append(Recipe(name, data["description"], data.get("model", "nano"), str(task), kinds, path))
    return found


def read(recipe: str, overrides: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """(name, raw data) of a recipe, given by its name or by the path of a YAML file. Raises for a misspelt key in it or
    in ``overrides``, which are not applied."""
    name, data = _find(recipe)
    if "experiment" not in data:
        check_spelling(data, overrides)
    return name, data


def _find(recipe: str) -> tuple[str, dict[str, Any]]:
    files = _files()
    if recipe in files:
        return recipe, text.parse_file(files[recipe])
    path = Path(recipe).expanduser()
    if path.is_dir():
        way_out = (
            f"it is a run folder: continue it with `earnest run {recipe} --resume`."
            if (path / "run.json").exists()
            else "give a YAML file."
        )
        raise ConfigError(f"{recipe} is a folder, not a recipe; {way_out}")
    if path.is_file():
        return path.stem, _beside(path, text.parse_file(path))
    if path.suffix in (".yaml", ".yml") or "/" in recipe:
        raise ConfigError(f"there is no file {recipe}; give one that exists, or a recipe: {', '.join(files)}.")
    raise ConfigError(
        f"recipe {recipe!r} is unknown: {nearest(recipe, files)} `earnest recipes` lists them; a YAML file works too."
    )


def experiments(recipe: str) -> ModuleType:
    """The package ``experiments`` of the clone from which earnest runs; a wheel does not contain it."""
    clone = Path(str(resources.files("earnest"))).parents[1]
    if not (clone / "experiments" / "__init__.py").is_file():
        raise ConfigError(
            f"{recipe} is an experiment of several runs, and experiments are not part of the installed package; "
            "clone the repository, install it with `pip install -e ./earnest-audit -e .`, and repeat the command."
        )
    if str(clone) not in sys.path:
        sys.path.insert(0, str(clone))
    return import_module("experiments")


_WITH_FILES = ("import", "task", "grade", "data")


def _beside(recipe: Path, data: dict[str, Any]) -> dict[str, Any]:
    """The data with absolute paths for files of the recipe's folder under ``import``, ``task``, ``grade``, ``data``."""

    def placed(value: str) -> str:
        file = value.rpartition(":")[0] if ".py:" in value else value
        return str(recipe.parent / value) if "." in file and (recipe.parent / file).is_file() else value

    return {key: text.map_texts(placed, value) if key in _WITH_FILES else value for key, value in data.items()}
