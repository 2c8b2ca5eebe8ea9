"""Messages to tokens, with a mark on every token that is trained.

A row is made of pieces, tokenized one by one, as a conversation grows when the policy answers turn by turn:

    render(messages before the turn, with the generation prompt)   not trained
    the rest of render(messages up to the turn)                    trained, up to and with the token that ends the turn

So the trained tokens are those that the policy would have to sample. A template with `{% generation %}` marks the
trained part itself; its mark is used, and extended to the token that ends the turn. A template that rewrites history
(reasoning removed from earlier turns) gives a conversation several rows, one for each turn whose history differs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any, Literal, Protocol

from earnest.data.layouts import Example, Message, RowError

LossOn = Literal["assistant", "last", "all"]


class Renderer(Protocol):
    """The part of a policy that rendering needs."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def eos_ids(self) -> Collection[int]: ...
    def render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]: ...


@dataclass(frozen=True)
class Rendered:
    """The tokens of a row, and which of them are trained."""

    tokens: tuple[int, ...]
    trained: tuple[bool, ...]

    @property
    def prompt_length(self) -> int:
        """The number of tokens before the first one that is trained."""
        return self.trained.index(True)

    def __len__(self) -> int:
        return len(self.tokens)


def stretches(tokenizer: Any, row: Rendered) -> Iterator[tuple[bool, int, str]]:
    """(trained, number of tokens, text) of each unbroken run of trained or untrained tokens, in their order."""
    start = 0
    for i in range(1, len(row) + 1):
        if i == len(row) or row.trained[i] != row.trained[start]:
            text = tokenizer.decode(list(row.tokens[start:i]), clean_up_tokenization_spaces=False)
            yield row.trained[start], i - start, str(text)
            start = i


def demonstration(policy: Renderer, example: Example, loss_on: LossOn = "assistant") -> list[Rendered]:
    """The rows of a conversation or a text; more than one if the template rewrites earlier turns."""
    if example.kind == "text":
        return [_plain(policy, "", example.text)]
    rows = list(_rows(policy, example.prompt, example.reply, example.tools))
    if loss_on == "last":
        rows = [_last_run(rows[-1])]
    if loss_on == "all":
        rows = [Rendered(rows[-1].tokens, (False,) + (True,) * (len(rows[-1]) - 1))]
    return rows


def answer(policy: Renderer, prompt: Sequence[Message], reply: Sequence[Message], tools: Sequence[Any]) -> Rendered:
    """One row whose trained tokens are the last message of ``reply``: an answer of a preference pair."""
    return _last_run(list(_rows(policy, prompt, reply, tools))[-1])


def _last_run(row: Rendered) -> Rendered:
    """Only the last unbroken run of trained tokens stays trained."""
    end = len(row.trained) - row.trained[::-1].index(True)
    start = end
    while start > 0 and row.trained[start - 1]:
        start -= 1
    return Rendered(row.tokens, tuple(start <= i < end for i in range(len(row.tokens))))


def _rows(
    policy: Renderer, prompt: Sequence[Message], reply: Sequence[Message], tools: Sequence[Any]
) -> Iterator[Rendered]:
    template = policy.tokenizer.chat_template
    if template is None:
        yield _without_template(policy, prompt, reply)
        return
    written = " ".join(template.values()) if isinstance(template, Mapping) else str(template)
    if re.search(r"{%-?\s*generation\b", written) and (marked := _marked(policy, prompt, reply, tools)) is not None:
        yield marked
        return
    yield from _by_prefixes(policy, prompt, reply, tools)


def _marked(
    policy: Renderer, prompt: Sequence[Message], reply: Sequence[Message], tools: Sequence[Any]
) -> Rendered | None:
    """The row with the template's mark; None unless there is one marked run for each assistant message."""
    found = _applied(
        policy, (*prompt, *reply), tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    tokens, mask = list(found["input_ids"]), [bool(m) for m in found["assistant_masks"]]
    runs = _runs(mask)
    before = sum(m["role"] == "assistant" for m in prompt)
    if len(runs) != before + sum(m["role"] == "assistant" for m in reply):
        return None
    trained = [False] * len(tokens)
    for start, end in runs[before:]:
        size = _end(policy, tokens[start : end + 1])  # the mark may leave out the token that ends the turn
        if size is None:
            return None
        trained[start : start + size] = [True] * size
    last = len(trained) - trained[::-1].index(True)
    return Rendered(tuple(tokens[:last]), tuple(trained[:last]))


def _runs(mask: Sequence[bool]) -> list[tuple[int, int]]:
    edges = [i for i in range(len(mask) + 1) if (i < len(mask) and mask[i]) != (i > 0 and mask[i - 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _by_prefixes(
    policy: Renderer, prompt: Sequence[Message], reply: Sequence[Message], tools: Sequence[Any]
) -> Iterator[Rendered]:
    messages = [*prompt, *reply]
    tokens: list[int] = []
    trained: list[bool] = []
    written = ""  # the text that ``tokens`` stand for
    for i in range(len(prompt), len(messages)):
        if messages[i]["role"] != "assistant":
            continue
        asked = _text(policy, messages[:i], tools, generation_prompt=True)
        whole = _text(policy, messages[: i + 1], tools)
        start = _common(asked, whole)
        if start < _common(_text(policy, messages[:i], tools), asked):
            raise RowError(
                f"the chat template of {policy.name} writes the messages before an answer differently once the answer "
                "is there, so no prompt leads to this answer; use another chat template."
            )
        if written and not whole.startswith(written):  # history was rewritten: this turn gets a row of its own
            yield Rendered(tuple(tokens), tuple(trained))
            tokens, trained, written = [], [], ""
        before = _ids(policy, whole[len(written) : start])
        turn = _turn(policy, messages[i], whole[start:])
        tokens += before + turn
        trained += [False] * len(before) + [True] * len(turn)
        end = policy.tokenizer.convert_ids_to_tokens(turn[-1])
        before_end, found, _ = whole[start:].partition(end)
        written = whole[:start] + before_end + found  # all but what follows the end of the turn
    yield Rendered(tuple(tokens), tuple(trained))


def _turn(policy: Renderer, message: Message, text: str) -> list[int]:
    """The tokens of an assistant turn, up to and with the one that ends it; templates may write a line break after."""
    ids = _ids(policy, text)
    end = _end(policy, ids)
    if end is None:
        raise RowError(
            f"the chat template of {policy.name} never ends a turn, so no answer learns to stop; use another one."
        )
    content = message.get("content")
    if isinstance(content, str) and _squeezed(content) not in _squeezed(policy.tokenizer.decode(ids[:end])):
        raise RowError(
            f"the tokens of the answer {content[:40]!r} do not give it back: the chat template of {policy.name} "
            "changes it, it has a token that ends a turn in it, or the tokenizer cannot write it."
        )
    return ids[:end]


def _end(policy: Renderer, ids: Sequence[int]) -> int | None:
    """The place after the first token that ends a turn: a sampler stops there."""
    return next((i + 1 for i, token in enumerate(ids) if token in policy.eos_ids), None)


def _common(a: str, b: str) -> int:
    return len(commonprefix([a, b]))  # noqa: RUF071 (texts, not paths)


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _text(
    policy: Renderer, messages: Sequence[Message], tools: Sequence[Any], *, generation_prompt: bool = False
) -> str:
    if not messages:
        return ""
    return str(_applied(policy, messages, tools, tokenize=False, add_generation_prompt=generation_prompt))


def _applied(policy: Renderer, messages: Sequence[Message], tools: Sequence[Any], **options: Any) -> Any:
    """The chat template on these messages; what it refuses is the row's problem."""
    from jinja2.exceptions import TemplateError

    try:
        return policy.tokenizer.apply_chat_template([dict(m) for m in messages], tools=list(tools) or None, **options)
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        raise RowError(f"the chat template of {policy.name} refuses the messages: {error}") from None


def _ids(policy: Renderer, text: str) -> list[int]:
    return list(policy.tokenizer(text, add_special_tokens=False)["input_ids"])


def _without_template(policy: Renderer, prompt: Sequence[Message], reply: Sequence[Message]) -> Rendered:
    if len(prompt) != 1 or len(reply) != 1 or prompt[0]["role"] != "user":
        raise RowError(
            f"the tokenizer of {policy.name} has no chat template, and only one prompt with one answer can be written "
            "without; set chat_template in the recipe."
        )
    return _plain(policy, str(prompt[0]["content"]), str(reply[0]["content"]))


def _plain(policy: Renderer, prompt: str, completion: str) -> Rendered:
    """Plain texts one after the other, and the token that ends a text."""
    end = policy.tokenizer.eos_token_id
    if end is None:
        raise RowError(f"the tokenizer of {policy.name} has no end-of-text token, so no answer learns to stop.")
    before = list(policy.tokenizer(prompt)["input_ids"]) if prompt else []
    rest = _ids(policy, completion) if prompt else list(policy.tokenizer(completion)["input_ids"])
    rest = rest if rest and rest[-1] == end else [*rest, int(end)]
    skip = 0 if before else 1  # the first token of a row has nothing before it to be predicted from
    return Rendered((*before, *rest), (False,) * (len(before) + skip) + (True,) * (len(rest) - skip))
