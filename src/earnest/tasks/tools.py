"""Tools: Python functions with types and docstrings, called by name with JSON arguments, in a sandbox.

    def price(item: str) -> int:
        \"\"\"The price of an item.

        Args:
            item: The name of the item.
        \"\"\"

    Tools([price]).call("price", {"item": "lamp"}).text

The policy sees the JSON schema of the function. A parameter whose name begins with an underscore is not in the schema:
the environment gives its value. Whatever goes wrong is one sentence in the observation, for the policy to read.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, get_type_hints

from earnest.errors import nearest
from earnest.tasks.base import TaskError
from earnest.tasks.sandbox import CallResult, Limits, Sandbox, entry_of

if TYPE_CHECKING:
    import pydantic


@dataclass(frozen=True)
class Observation:
    """What the policy reads after a call. ``failed``: the call was malformed, or the tool raised or hit a limit."""

    text: str
    failed: bool = False


@dataclass(frozen=True)
class Tool:
    """A function, its JSON schema for chat templates, and the model that checks arguments."""

    function: Callable[..., Any]
    schema: Mapping[str, Any]
    arguments: type[pydantic.BaseModel]
    given: tuple[str, ...] = ()
    """Parameters that the environment gives; their names begin with an underscore."""

    @property
    def name(self) -> str:
        return self.function.__name__

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """The tool of a function; raises where its types or its docstring do not define it."""
        import pydantic
        from transformers.utils.chat_template_utils import (
            DocstringParsingException,
            TypeHintParsingException,
            get_json_schema,
        )

        name = getattr(function, "__name__", repr(function))
        entry_of(function)  # raises if no other process can import it
        parameters = inspect.signature(function).parameters.values()
        if any(p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters):
            raise TaskError(f"tool {name}: every parameter needs a name; *args, **kwargs and / are not possible.")
        shown = [p for p in parameters if not p.name.startswith("_")]

        def signature() -> None: ...

        try:
            hints = get_type_hints(function)
            signature.__name__, signature.__doc__ = name, inspect.getdoc(function)
            signature.__annotations__ = {p.name: hints[p.name] for p in shown if p.name in hints}
            signature.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
            schema = get_json_schema(signature)
            fields: Any = {p.name: (hints[p.name], ... if p.default is p.empty else p.default) for p in shown}
            model = pydantic.create_model(name, __config__=pydantic.ConfigDict(extra="forbid"), **fields)
        except (DocstringParsingException, TypeHintParsingException, NameError, pydantic.PydanticUserError) as error:
            reason = " ".join(map(str, error.args)).rstrip(".!")
            raise TaskError(
                f"tool {name}: {reason}. A tool needs a docstring with a line for every argument under 'Args:', and a "
                "type such as int, float, str, bool, list[int], dict[str, str] or Literal for each."
            ) from None
        return cls(function, schema, model, tuple(p.name for p in parameters if p.name.startswith("_")))

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as JSON data of the declared types; a ValueError has one sentence for the policy."""
        import pydantic

        try:
            return self.arguments.model_validate(arguments).model_dump(mode="json", exclude_unset=True)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            if first["type"] == "missing":
                raise ValueError(f"{self.name} needs the argument {place}") from None
            if first["type"] == "extra_forbidden":
                known = ", ".join(self.arguments.model_fields) or "none"
                raise ValueError(f"{self.name} has no argument {place} (its arguments: {known})") from None
            raise ValueError(f"{place}={json.dumps(first['input'], default=repr)[:80]}: {first['msg']}") from None


class Tools:
    """The tools of an environment, with the sandbox that calls them."""

    def __init__(self, functions: Sequence[Callable[..., Any]], sandbox: Sandbox | None = None) -> None:
        self.functions, self._sandbox = tuple(functions), sandbox

    @cached_property
    def by_name(self) -> dict[str, Tool]:
        made = {tool.name: tool for tool in map(Tool.of, self.functions)}
        if len(made) < len(self.functions):
            raise TaskError(f"two tools have the same name; the names are {', '.join(made)}.")
        return made

    @cached_property
    def sandbox(self) -> Sandbox:
        return self._sandbox or Sandbox()

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        return [tool.schema for tool in self.by_name.values()]

    def call(
        self,
        name: str,
        arguments: Mapping[str, Any],
        given: Mapping[str, Any] | None = None,
        limits: Limits | None = None,
    ) -> Observation:
        """Call a tool. ``given``: values for its hidden parameters, by their names without the underscore."""
        tool = self.by_name.get(name)
        if tool is None:
            return Observation(f"Error: there is no tool {name!r}: {nearest(name, list(self.by_name))}", failed=True)
        try:
            checked = tool.check(arguments)
        except ValueError as error:
            return Observation(f"Error: {error}.", failed=True)
        hidden = {p: (given or {})[p[1:]] for p in tool.given}
        return observe(self.sandbox.call(tool.function, {**checked, **hidden}, limits))


def observe(outcome: CallResult) -> Observation:
    """The text that the policy reads of an outcome: what was printed, then the result or the error."""
    printed = outcome.output.rstrip("\n")
    if outcome.error:
        return Observation("\n".join(filter(None, [printed, f"Error: {outcome.error}."])), failed=True)
    value = outcome.value if isinstance(outcome.value, str) else json.dumps(outcome.value, ensure_ascii=False)
    return Observation("\n".join(filter(None, [printed, "" if outcome.value is None else value])))
