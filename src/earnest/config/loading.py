"""Recipe + ``key=value`` → ``RunConfig``, and back to YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from earnest.config import recipes, text
from earnest.config.explain import sentence
from earnest.config.overrides import merge
from earnest.config.schema import LoopConfig, RunConfig
from earnest.data.dataset import DataSettings
from earnest.errors import ConfigError
from earnest.settings import make

M = TypeVar("M", bound=BaseModel)

NOT_OF_THE_RUN = ("out", "description")
"""Keys that do not change what is computed: a moved folder is still the same run."""


def load(recipe: str, overrides: Sequence[str] = ()) -> tuple[str, RunConfig]:
    """(name of the recipe, config) of a recipe by name or of a YAML file."""
    name, data = recipes.read(recipe, overrides)
    if "experiment" in data:
        raise ConfigError(f"{recipe} is an experiment of several runs, not one run; `earnest run {recipe}` starts it.")
    return name, from_mapping(data, overrides)


def load_file(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    return from_mapping(text.parse_file(path), overrides)


def from_mapping(data: Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Check ``data`` with the overrides applied. Problems are one sentence in a ``ConfigError``."""
    return check_mapping(RunConfig, _without_its_task(data, overrides), overrides)


def _without_its_task(data: Mapping[str, Any], overrides: Sequence[str]) -> Mapping[str, Any]:
    """The recipe without its own ``task``, where ``data`` on the command line takes its place: no term samples the
    task's prompts, so the run is evaluated on the user's rows. ``task=…`` on the command line keeps a task."""
    given = {override.partition("=")[0].split(".")[0].strip() for override in overrides}
    if "data" not in given or "task" in given or not data.get("task") or data.get("data"):
        return data
    without = {key: value for key, value in data.items() if key != "task"}
    if "grade" in given:
        return without
    wants = check_mapping(RunConfig, data, overrides).build_objective().wants()
    return data if "rollout" in wants.roles and not wants.any_row else without


def check_mapping(model: type[M], data: Mapping[str, Any], overrides: Sequence[str] = ()) -> M:
    """``from_mapping`` for any model, not only a run's."""
    try:
        return model.model_validate(merge(data, overrides))
    except ValidationError as error:
        raise ConfigError(sentence(error, model)) from None


def data_settings(data: Mapping[str, Any], overrides: Sequence[str] = ()) -> DataSettings:
    """The settings of a data file, from the mapping under ``data:`` or the command line."""
    return make(DataSettings, merge(data, overrides))


def dump(config: LoopConfig) -> str:
    """The resolved config as YAML with every default; ``load_file`` reads it back as the same config."""
    data = config.model_dump(mode="python", by_alias=True)
    data.pop("out")
    return text.spell(data)


def changed_keys(old: LoopConfig, new: LoopConfig) -> list[str]:
    """Dotted keys whose values differ, without the keys that do not change what is computed."""
    before, after = (_flatten(config.model_dump(mode="python", by_alias=True)) for config in (old, new))
    keys = [k for k in {**before, **after} if before.get(k, _ABSENT) != after.get(k, _ABSENT)]
    return sorted(k for k in keys if k.split(".")[0] not in NOT_OF_THE_RUN)


_ABSENT = object()


def _flatten(data: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(data, Mapping) and data:
        return {k: v for key, value in data.items() for k, v in _flatten(value, f"{prefix}{key}.").items()}
    if isinstance(data, list) and any(isinstance(item, Mapping) for item in data):
        return {k: v for i, value in enumerate(data) for k, v in _flatten(value, f"{prefix}{i}.").items()}
    return {prefix.rstrip("."): data}
