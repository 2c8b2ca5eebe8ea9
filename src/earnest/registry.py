"""Registries of the objectives, adapters, optimizers and tasks that a recipe can name: earnest's own and the user's."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, MutableMapping
from dataclasses import fields, is_dataclass
from typing import TypeVar

from earnest import plugins
from earnest.errors import EarnestError, nearest

T = TypeVar("T")


class Registry(MutableMapping[str, T]):
    """All items of one sort by name. The first read imports every module of the package ``folder`` (empty: none), so a
    file in that folder need not be listed anywhere, and then the installed plug-ins."""

    def __init__(self, sort: str, folder: str, error: type[EarnestError]) -> None:
        self.sort, self.folder, self.error = sort, folder, error
        self.imported: set[str] = set()  # the names that are not earnest's own
        self._items: dict[str, T] = {}
        self._searched: tuple[str, ...] | None = None

    def add(self, name: str, item: T, *, own: bool | None = None) -> None:
        """Register ``item`` as ``name``; raises if the name is taken. ``own``: whether the item is part of earnest;
        None: it is if its class is defined in earnest."""
        cls = item if isinstance(item, type) else type(item)
        own = cls.__module__.startswith("earnest.") if own is None else own
        if not own:
            self._search()  # so that a taken name raises here, and not when earnest's own file is imported later
        if isinstance(item, type) and is_dataclass(item) and (bare := [f.name for f in fields(item) if not f.metadata]):
            raise self.error(
                f"{self.sort} {name!r}: the field {bare[0]!r} has no range and no meaning; declare it with "
                "earnest.settings.setting(default, meaning, …)."
            )
        known = self._items.get(name)
        taken = known if isinstance(known, type) else type(known)
        again = isinstance(item, type) and (taken.__module__, taken.__qualname__) == (cls.__module__, cls.__qualname__)
        if known is not None and not again:  # a class that is defined again replaces itself, as in a notebook
            raise self.error(
                f"the {self.sort} name {name!r} is taken by {taken.__qualname__} of {taken.__module__}; "
                "choose another name."
            )
        self._items[name] = item
        if not own:
            self.imported.add(name)

    def find(self, name: str) -> T:
        """The item of this name, or an error with the nearest one."""
        if name not in self:
            raise self.error(f"{self.sort} {name!r} is unknown: {nearest(name, self)}")
        return self[name]

    def _search(self) -> None:
        path = tuple(importlib.import_module(self.folder).__path__) if self.folder else ()
        if path == self._searched:
            return
        self._searched = path  # before the imports: a module that reads the registry must not start another search
        try:
            for info in pkgutil.iter_modules(path):
                importlib.import_module(f"{self.folder}.{info.name}")
            plugins.load_installed()
        except BaseException:
            self._searched = None
            raise

    def __getitem__(self, name: str) -> T:
        self._search()
        return self._items[name]

    def __setitem__(self, name: str, item: T) -> None:
        self.add(name, item)

    def __delitem__(self, name: str) -> None:
        del self._items[name]
        self.imported.discard(name)

    def __iter__(self) -> Iterator[str]:
        self._search()
        return iter(self._items)

    def __len__(self) -> int:
        self._search()
        return len(self._items)
