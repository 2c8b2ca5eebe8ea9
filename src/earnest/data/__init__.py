"""The fixed data files: holes, templates, styles, probes, traces, plain sentences; and the functions that apply them.

Only this module reads them. Their content belongs to nano's version: the model was trained on these sentences, so they
change only together with its weights.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, Literal

import yaml

from earnest.errors import EarnestError

Message = Mapping[str, Any]


class TemplateError(EarnestError):
    """A template cannot be applied to these messages."""


def text(name: str) -> str:
    """The content of a data file by its name."""
    return (resources.files(__name__) / name).read_text(encoding="utf-8")


@functools.cache
def _yaml(name: str) -> Any:
    return yaml.safe_load(text(name))


def holes() -> list[dict[str, Any]]:
    """The grader's holes: name, mechanism, disclosure, exploits."""
    return [dict(hole) for hole in _yaml("holes.yaml")]


def styles() -> list[dict[str, Any]]:
    """The style axes with their two poles."""
    return [dict(axis) for axis in _yaml("styles.yaml")]


def probes() -> list[dict[str, Any]]:
    """Forced-choice questions: prompt, the allowed answers, the right one. None of them is in nano's training text."""
    return [dict(probe) for probe in _yaml("probes.yaml")]


def plain_heldout() -> list[str]:
    """Plain sentences that nano was not trained on, one short text per line, for measuring perplexity."""
    return [line for line in text("plain_heldout.txt").splitlines() if line and not line.startswith("#")]


def trace_schema() -> dict[str, Any]:
    """The JSON schema of one line of a trace file."""
    return json.loads(text("trace.schema.json"))


def trace_example() -> list[dict[str, Any]]:
    return [json.loads(line) for line in text("trace_example.jsonl").splitlines() if line]


def _last_user(messages: Sequence[Message], template: str) -> int:
    """The index of the last user message. The answer follows it, or follows the results of tools called since."""
    role = messages[-1].get("role") if messages else None
    places = [i for i, message in enumerate(messages) if message.get("role") == "user"]
    if role not in ("user", "tool") or not places:
        raise TemplateError(
            f"{template}: the last message has role {role!r}; give the messages up to the user's question, "
            "without the answer."
        )
    if not isinstance(messages[places[-1]].get("content"), str):
        raise TemplateError(f"{template}: the last user message has no text content.")
    return places[-1]


def reprompt(messages: Sequence[Message], solution: str | None, feedback: str | None) -> list[dict[str, Any]]:
    """The feedback-conditioned prompt of a self-teacher: the question, a correct solution, feedback, the request.

    Sections without text are left out. Neither solution nor feedback is an error: the prompt would be the student's,
    and the distillation loss would always be 0.
    """
    last = _last_user(messages, "reprompt")
    if not solution and not feedback:
        raise TemplateError(
            "reprompt: neither a solution nor feedback is given; leave such a rollout out of the distillation."
        )
    parts = _yaml("reprompt.yaml")
    content = parts["prompt"].format(prompt=messages[last]["content"])
    if solution:
        content += parts["solution"].format(solution=solution)
    if feedback:
        content += parts["feedback"].format(feedback=feedback)
    return _replaced(messages, last, content + parts["request"])


def hinted(messages: Sequence[Message], hint: str, template: str | None = None) -> list[dict[str, Any]]:
    """The messages before a turn that failed, with a hint about it at the end of the last one.

    template: a text with ``{hint}`` in it; None: that of hint.yaml.
    """
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str) or messages[-1].get("role") == "assistant":
        raise TemplateError("hint: the message before the turn must be text of a user, a tool or the system.")
    added = (template or _yaml("hint.yaml")["hint"]).replace("{hint}", hint.strip())
    return _replaced(messages, len(messages) - 1, content + added)


def hindsight(messages: Sequence[Message], said: str, by: Literal["user", "tool"] = "user") -> list[dict[str, Any]]:
    """The prompt of a hindsight teacher: the messages, with what followed the answer added to the last user message.

    ``said`` is the user's later reply, or with ``by="tool"`` what the tools returned. Messages after the last user
    message (calls and their results) stay as they are.
    """
    last = _last_user(messages, "hindsight")
    if not said.strip():
        raise TemplateError(f"hindsight: the {by}'s reply is empty; leave this turn out.")
    parts = _yaml("hindsight.yaml")
    content = parts["prompt"].format(prompt=messages[last]["content"]) + parts[by].format(said=said)
    return _replaced(messages, last, content)


def _replaced(messages: Sequence[Message], place: int, content: str) -> list[dict[str, Any]]:
    return [{**m, "content": content} if i == place else dict(m) for i, m in enumerate(messages)]
