"""The interface of an environment: a task of several turns. The policy answers, the environment replies, until it ends.

    state, messages = reset(prompt, seed)
    repeat:  the policy samples an assistant message
             messages, done, reward = step(state, message)
    grade(state, ending)

Rollouts render messages, sample, parse the policy's tokens into a message and enforce the limits. An environment sees
messages only, never tokens. Messages are those of transformers' chat templates: mappings with ``role`` and ``content``.
An assistant message that calls tools has ``tool_calls``, a list of

    {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}

with the arguments as a mapping. Calls that cannot be parsed are not in the list; ``tool_call_errors`` has one sentence
for each of them, so that the environment can reply with it. The reply to a call has the role ``tool``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from earnest.tasks.base import Grade, Prompt, Split

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Message = Mapping[str, Any]

Ending = Literal["answered", "turn_limit", "token_limit", "tool_failure"]
"""Why a conversation ended: the environment ended it, it had the largest number of turns, the policy had no tokens
left, or the environment (or a tool that it does not survive) raised."""


@dataclass(frozen=True)
class Opening:
    """The start of a conversation: what the policy reads first, and the environment's state of this conversation."""

    messages: tuple[Message, ...]
    state: Any = None


@dataclass(frozen=True)
class StepResult:
    """The environment's reply to an assistant message.

    ``messages`` are what the policy reads next (tool results, a user's message); they may be empty only if ``done``.
    ``reward`` is that of this turn; the reward of the whole conversation is in its grade. ``ending`` needs ``done``.
    """

    messages: tuple[Message, ...] = ()
    done: bool = False
    reward: float = 0.0
    ending: Ending = "answered"


@runtime_checkable
class Environment(Protocol):
    """Seeded prompts in two splits that never share a question, and conversations about them.

    Many conversations run at the same time in one event loop, so ``reset``, ``step`` and ``grade`` wait with ``await``
    (``asyncio.to_thread`` for code that blocks), and keep what they know of a conversation in its state alone.
    """

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the tools that the policy can call, for the chat template; empty if there are none."""

    def prompts(self, split: Split, count: int, seed: int) -> list[Prompt]:
        """``count`` prompts, the same for the same seed, without repetition while the task has new questions."""

    async def reset(self, prompt: Prompt, seed: int) -> Opening:
        """Start a conversation. Everything random in it must follow from ``seed``."""

    async def step(self, state: Any, message: Message) -> StepResult:
        """Reply to the policy's message. A tool that fails is a reply, not an exception."""

    async def grade(self, state: Any, ending: Ending) -> Grade:
        """The grade of the whole conversation; its reward is added to those of the turns. It is called once at the end
        of each conversation, so it may also release what the state holds."""


def is_environment(task: object) -> TypeIs[Environment]:
    """Whether a task has several turns. An environment also has the members of ``Task``, but grades a whole state."""
    return isinstance(task, Environment)
