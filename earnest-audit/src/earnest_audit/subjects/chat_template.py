"""TEMPLATE: What is sampled from is a prefix of what is trained on, and exactly the assistant's words are supervised.

prefix      prompt(messages up to an answer) is the beginning of tokens(messages)
supervised  another text of the user or the system leaves the supervised tokens as they are; another answer does not
ends        the end of every answer is supervised
untrained   answers that are declared not to be trained are not supervised, and neither are their ends
inputs      the messages are not written into

Needs: tokens(messages) -> (ids, mask), prompt(messages) -> ids; messages with answers of the role "assistant"; end;
trained, where only some answers are trained
How: A conversation is rendered whole, up to each answer, and with one other text at a time.
Exceptions: Templates that remove earlier reasoning are no prefix by design: prefix=False. Answers that are not trained
by design (a masked history, demonstrations) are left out of trained.
Detects: Megatron-Bridge #3359, marin #7237 and TRL #4201 (no generation marks: everything or nothing is supervised), a
system prompt or an end of text on one side only, an end of turn that is masked
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from earnest_audit.law import Law
from earnest_audit.verdict import Finding

Messages = Sequence[Mapping[str, Any]]


@dataclass
class ChatTemplate:
    """``tokens(messages)`` gives the ids that are trained on and which of them are supervised (1 or 0 each);
    ``prompt(messages)`` the ids that an answer is sampled from; ``end`` is the id that ends an answer. ``prefix=False``
    where the template rewrites earlier turns by design. ``trained`` are the places in ``messages`` of the answers that
    are supervised, where that is not all of them."""

    tokens: Callable[[list[Mapping[str, Any]]], tuple[Sequence[int], Sequence[int]]]
    prompt: Callable[[list[Mapping[str, Any]]], Sequence[int]]
    messages: Messages
    end: int | None = None
    prefix: bool = True
    trained: Sequence[int] | None = None

    def check(self) -> Iterator[Finding]:
        messages = list(self.messages)
        given = copy.deepcopy(messages)
        ids = list(self.tokens(given)[0])
        same, why = given == messages, "The template writes into the messages: the next use gets others."
        yield LAW.finding("the messages afterwards", "unchanged" if same else "changed", "unchanged", same, why)
        answers, taught = [i for i, m in enumerate(messages) if m["role"] == "assistant"], self._taught(messages)
        share = f"{len(taught)} of {len(ids)} tokens"
        why = "Nothing is supervised, or everything is, the prompt included: the template marks no assistant span."
        yield LAW.finding("supervised share", share, "some, not all", 0 < len(taught) < len(ids), why)
        if self.prefix:
            yield from (self._begins(ids, i) for i in answers)
        if self.trained is not None:
            answers = [i for i in answers if i in self.trained]
        others = [i for i in range(len(messages)) if i not in answers]
        moved = [str(i) for i in others if self._taught_with_other(i) != taught]
        more = ": other words of a user, the system or an answer that is not trained change what is supervised."
        yield LAW.none("words of others", moved, f"{len(moved)} of {len(others)} messages are supervised", more)
        deaf = [str(i) for i in answers if self._taught_with_other(i) == taught]
        more = ": another answer leaves the supervised tokens as they are: this answer is not supervised."
        yield LAW.none("the assistant's words", deaf, f"{len(deaf)} of {len(answers)} answers are not supervised", more)
        if self.trained is not None and answers:
            yield self._without_history(answers[0], taught)
        if self.end is None:
            yield LAW.not_declared("ends of answers", "end=…, the id that ends an answer,")
            return
        ends = sum(t == self.end for t in taught)
        why = "An answer's end is not supervised, so the model does not learn to stop."
        yield LAW.finding("ends of answers", f"{ends} supervised", f"{len(answers)} or more", ends >= len(answers), why)

    def _begins(self, ids: list[int], answer: int) -> Finding:
        asked = list(self.prompt(copy.deepcopy(list(self.messages[:answer]))))
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(asked, ids, strict=False)))
        return LAW.finding(
            f"the prompt of message {answer}", f"{common} of its {len(asked)} ids begin the conversation",
            "all of them", common == len(asked),
            "Answers are sampled after another text than they are trained after: a system prompt, a generation "
            "prompt or a space is on one side only.",
        )  # fmt: skip

    def _without_history(self, first: int, taught: list[int]) -> Finding:
        """What is supervised where everything before the exchange of the first trained answer is left out."""
        asks = [i for i in range(first) if self.messages[i]["role"] == "user"]
        head = [m for m in self.messages[: asks[-1]] if m["role"] == "system"] if asks else []
        alone = self._taught([*head, *self.messages[asks[-1] if asks else 0 :]])
        why = "Something in turns that are not trained is supervised, such as the end of an earlier answer."
        measured = f"{len(taught)} tokens are supervised, {len(alone)} without those turns"
        return LAW.finding("turns that are not trained", measured, "the same", alone == taught, why)

    def _taught_with_other(self, changed: int) -> list[int]:
        """The supervised tokens where one message has another text."""
        messages = list(self.messages)
        messages[changed] = {**messages[changed], "content": f"{messages[changed]['content']} 7 x"}
        return self._taught(messages)

    def _taught(self, messages: Messages) -> list[int]:
        """The supervised tokens of a conversation."""
        ids, mask = self.tokens(copy.deepcopy(list(messages)))
        return [t for t, on in zip(ids, mask, strict=True) if on]


LAW = Law("TEMPLATE", "chat template (ChatTemplate)", __doc__, ChatTemplate.check)
