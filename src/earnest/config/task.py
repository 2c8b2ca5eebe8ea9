"""The keys of a task: its name and its own settings."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, model_serializer, model_validator

from earnest import plugins
from earnest.config.kinds import Strict
from earnest.errors import ConfigError


class TaskConfig(Strict):
    """The task to learn; ``task: NAME`` is short for ``task: {name: NAME}``. ``fields`` holds the task's settings."""

    hidden_fields: ClassVar[tuple[str, ...]] = ("fields",)

    name: Annotated[str, Field(min_length=1), AfterValidator(plugins.absolute)] = Field(
        description="`earnest tasks` lists them; `earnest tasks NAME` shows the settings. Your own: `my_task.py:Name`"
    )
    fields: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, data: Any) -> Any:
        if isinstance(data, str):
            return {"name": data}
        if isinstance(data, dict):
            rest = {key: value for key, value in data.items() if key != "name"}
            return {key: value for key, value in data.items() if key == "name"} | {"fields": rest}
        if not isinstance(data, cls):
            raise ConfigError(f"must be a text, got {data!r}.")
        return data

    @model_serializer(mode="plain")
    def _flat(self) -> Any:
        return {"name": self.name, **self.fields} if self.fields else self.name
