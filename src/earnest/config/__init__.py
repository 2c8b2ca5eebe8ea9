"""From YAML and ``key=value`` to a checked ``RunConfig``."""

from __future__ import annotations

from earnest.config.load import changed_keys as changed_keys
from earnest.config.load import data_settings as data_settings
from earnest.config.load import dump as dump
from earnest.config.load import from_mapping as from_mapping
from earnest.config.load import load as load
from earnest.config.load import load_file as load_file
from earnest.config.recipes import Recipe as Recipe
from earnest.config.recipes import list_recipes as list_recipes
from earnest.config.schema import LoopConfig as LoopConfig
from earnest.config.schema import RunConfig as RunConfig
