"""The tokens of a conversation while it grows. Nothing that the policy sampled is tokenized again.

    tokens of the next turn's prompt  =  tokens so far  +  tokens of the new messages alone

The new messages alone are what the chat template writes after the policy's turn: render(… turn, messages) without
render(… turn). That is right only if the template leaves what it wrote before as it was, and writes the turn as it was
sampled. Both are checked on the text at every turn. Where one fails (a template that removes the reasoning of earlier
turns), the conversation goes on in a new row, whose prompt is the template's own rendering of the whole history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from earnest.errors import ConfigError
from earnest.models.protocol import PolicyLike
from earnest.rollouts.rollout import Rollout
from earnest.rollouts.trajectory import Author, Segment, Segments
from earnest.tasks.environment import Message

_AUTHORS: Mapping[str, Author] = {"tool": "tool", "user": "user"}


class Transcript:
    """A conversation of the policy with an environment, as messages and as rows of segments."""

    def __init__(
        self, policy: PolicyLike, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self.policy, self.tools = policy, tools
        self.messages: list[Message] = list(messages)
        self.rows: list[list[Segment]] = []
        self.histories: list[tuple[Message, ...]] = []
        self._ends = [str(policy.tokenizer.decode([i], skip_special_tokens=False)) for i in sorted(policy.eos_ids)]
        self._asked = ""  # the text of this row up to the policy's next turn
        self._new_row()

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens that the policy reads before its next turn."""
        return tuple(token for segment in self.rows[-1] for token in segment.tokens)

    def finished(self) -> tuple[tuple[Segments, ...], tuple[tuple[Message, ...], ...]]:
        """(rows, the messages that each begins with), without a last row in which the policy had no turn any more."""
        pairs = zip(self.rows, self.histories, strict=True)
        kept = [(tuple(row), history) for row, history in pairs if any(s.author == "policy" for s in row)]
        return tuple(row for row, _ in kept), tuple(history for _, history in kept)

    def turn(self, rollout: Rollout, message: Message) -> None:
        """Append what the policy sampled, and the message that its tokens were parsed into."""
        sampled = Segment(rollout.tokens, "policy", rollout.logprobs, rollout.policy_version)
        self.rows[-1].append(sampled)
        self.messages.append(message)

    def observe(self, messages: Sequence[Message]) -> None:
        """Append the environment's messages and the beginning of the policy's next turn."""
        parsed = self.messages[-1]
        raw = {"role": "assistant", "content": self._said()}
        for turn in (parsed, raw):  # the raw text also has what the parser left out, such as a malformed call
            added = self._added(turn, messages)
            if added is not None:
                self.messages[-1:] = [turn, *messages]
                self._asked, text = added
                self.rows[-1] += authored(self.policy, text, messages)
                return
        self.messages += messages
        self._new_row()

    def _said(self) -> str:
        tokens = self.rows[-1][-1].tokens
        ended = bool(tokens) and tokens[-1] in self.policy.eos_ids
        return str(
            self.policy.tokenizer.decode(
                tokens[:-1] if ended else tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def _added(self, turn: Message, messages: Sequence[Message]) -> tuple[str, str] | None:
        """(text of the whole conversation, text after what the policy sampled), or None if the template writes the
        conversation so far in another way than it was."""
        history = [*self.messages[:-1], turn]
        try:
            before = self._text(history, generation_prompt=False)
            after = self._text([*history, *messages])
        except ConfigError:
            if turn is self.messages[-1]:
                raise
            return None  # some templates refuse a tool's message after a turn without a call
        if not (before.startswith(self._asked) and after.startswith(before)):
            return None
        written = before[len(self._asked) :]
        place, end = max((written.rfind(end), end) for end in self._ends) if self._ends else (-1, "")
        if place < 0 or _squeezed(written[:place]) != _squeezed(self._said()):
            return None
        ended = self.rows[-1][-1].tokens[-1] in self.policy.eos_ids
        return after, written[place + (len(end) if ended else 0) :] + after[len(before) :]

    def _new_row(self) -> None:
        self._asked = self._text(self.messages)
        tokens = tuple(self.policy.render(self.messages, tools=self.tools or None))
        row = authored(self.policy, self._asked, self.messages)
        if tuple(token for segment in row for token in segment.tokens) != tokens:
            row = [Segment(tokens, "template")]  # the tokenizer adds tokens to a text of its own accord
        self.rows.append(row)
        self.histories.append(tuple(self.messages))

    def _text(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> str:
        return rendered(self.policy, messages, self.tools, generation_prompt=generation_prompt)


def rendered(
    policy: PolicyLike,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    generation_prompt: bool = True,
) -> str:
    """The messages as text, by the chat template; what it refuses is a ``ConfigError``."""
    from jinja2.exceptions import TemplateError

    try:
        return policy.render_text(messages, tools=tools or None, add_generation_prompt=generation_prompt)
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        raise ConfigError(
            f"model: the chat template of {policy.name} refuses the messages of the environment ({error}); use a "
            "model whose template knows these roles, or set chat_template."
        ) from None


def authored(policy: PolicyLike, text: str, messages: Sequence[Message]) -> list[Segment]:
    """The tokens of ``text``, by author: a message's content is its role's, everything else the template's. Authors are
    for the reader of a report; only what the policy sampled is treated differently."""
    found = policy.tokenizer(text, add_special_tokens=False, return_offsets_mapping=policy.tokenizer.is_fast)
    spans: list[tuple[int, int, Author]] = []
    start = 0
    for message in messages:
        content, author = message.get("content"), _AUTHORS.get(str(message.get("role")))
        if isinstance(content, str) and content and (place := text.find(content, start)) >= 0:
            start = place + len(content)
            if author is not None:
                spans.append((place, start, author))
    offsets = found.get("offset_mapping") or [(0, 0)] * len(found["input_ids"])
    authors: list[Author] = [
        next((author for begin, end, author in spans if a < end and b > begin), "template") for a, b in offsets
    ]
    pairs = zip(authors, found["input_ids"], strict=True)
    return [Segment(tuple(t for _, t in same), author) for author, same in groupby(pairs, key=lambda pair: pair[0])]


_PROBE: tuple[Message, ...] = (
    {"role": "user", "content": "What is one plus two?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "A tool adds.",
        "tool_calls": [
            {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
        ],
    },
    {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "3"},
    {"role": "assistant", "content": "It is three.", "reasoning_content": "The tool returned 3."},
    {"role": "user", "content": "And with four more?"},
)
_PROBE_TOOLS: tuple[Mapping[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    },
)


def rewrites_history(policy: PolicyLike, *, with_tools: bool = True) -> str | None:
    """A sentence if the chat template rewrites earlier turns of a probe conversation (with reasoning, and with a tool
    call if ``with_tools``); None if every rendering begins with the one before it."""
    probe = _PROBE if with_tools else (_PROBE[0], *_PROBE[3:])
    tools = _PROBE_TOOLS if with_tools else ()
    ends = [i + 1 for i, message in enumerate(probe) if message["role"] == "assistant"]
    for end in ends:
        before = rendered(policy, probe[:end], tools, generation_prompt=False)
        for longer in range(end + 1, len(probe) + 1):
            if probe[longer - 1]["role"] == "assistant":
                continue
            if not rendered(policy, probe[:longer], tools).startswith(before):
                turn = probe[longer - 1]["role"]
                return (
                    f"The chat template of {policy.name} rewrites earlier turns when a {turn} message follows (many "
                    "remove the reasoning). Such a conversation becomes several rows, one for each history that the "
                    "policy read."
                )
    return None


def _squeezed(text: str) -> str:
    return "".join(text.split())
