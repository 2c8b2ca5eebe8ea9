"""Recipe keys that are settings of a class: the class declares them (``earnest.settings``), once.

``Kinded`` is a mapping whose ``kind`` names a registered class and whose other keys are that class's settings.
``key_of`` is one setting of a class as a key of a fixed mapping.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_serializer, model_validator

from earnest.registry import Registry
from earnest.settings import make, plain, settings

T = TypeVar("T")

Whole = Annotated[int, Field(ge=1)]

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)


class Strict(BaseModel):
    """A mapping whose keys are all known."""

    model_config = STRICT

    def changed(self, *keys: str) -> list[str]:
        """Those of these keys whose values are not the defaults."""
        fields = type(self).model_fields
        return [key for key in keys if getattr(self, key) != fields[key].get_default(call_default_factory=True)]


class Kinded(Strict, Generic[T]):
    """A mapping that describes a ``T``: its ``kind`` decides which other keys it has; ``fields`` holds those keys, with
    every default."""

    hidden_fields: ClassVar[tuple[str, ...]] = ("fields",)

    kind: str
    fields: dict[str, Any] = Field(default_factory=dict)
    _built: Any = PrivateAttr(None)

    @classmethod
    def registry(cls) -> Registry[type[T]]:
        """Where the kinds are registered."""
        raise NotImplementedError  # abstract: every subclass defines it

    @classmethod
    def known_fields(cls) -> list[str]:
        """Every field of any kind, for suggestions."""
        return sorted({name for kind in cls.registry().values() for name, _, _ in settings(kind)})

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        own = set(cls.model_fields) - {"fields"}
        return {k: v for k, v in data.items() if k in own} | {"fields": {k: v for k, v in data.items() if k not in own}}

    @model_validator(mode="after")
    def _resolve(self) -> Kinded[T]:
        self._built = make(self.registry().find(self.kind), self.values())
        self.fields = {k: v for k, v in plain(self._built).items() if k not in type(self).model_fields}
        return self

    def values(self) -> Mapping[str, Any]:
        """The settings of the class, as given."""
        return self.fields

    def build(self) -> T:
        """The instance that the mapping describes. It is frozen and made once."""
        return self._built

    @model_serializer(mode="plain")
    def _flat(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in type(self).model_fields if name != "fields"} | self.fields


def key_of(cls: type, name: str, default: Any = None) -> Any:
    """The pydantic field of the setting ``name`` of ``cls``: its range, its meaning and, unless given, its default."""
    declared, what = next((d, w) for n, d, w in settings(cls) if n == name)
    return Field(
        declared if default is None else default,
        description=what.doc,
        gt=what.above,
        ge=what.at_least,
        lt=what.below,
        le=what.at_most,
    )
