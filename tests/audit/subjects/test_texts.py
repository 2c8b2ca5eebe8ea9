"""ChatTemplate and Grader: prompts, supervised spans and rewards, each defect beside its fix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from earnest_audit import ChatTemplate, Grader, audit

END = 1
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "2 + 2"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3 + 3"},
    {"role": "assistant", "content": "6"},
]


def ids(text: str) -> list[int]:
    return [ord(c) + 10 for c in text]


def template(fault: str = "") -> ChatTemplate:
    def head(role: str) -> list[int]:
        return [2, *ids(role)]

    def tokens(messages: list[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
        out: list[int] = []
        mask: list[int] = []
        for m in messages:
            own = m["role"] == "assistant" or fault == "all"
            body = [*ids(m["content"]), END]
            out += [*head(m["role"]), *body]
            on = [int(own)] * len(body)
            if fault == "end":
                on[-1] = 0
            if fault == "last" and m is not messages[-1]:
                on = [0] * len(body)
            start = fault == "all" or (fault == "generation prompt" and m["role"] == "assistant")
            mask += [int(start)] * len(head(m["role"])) + on
        if fault == "writes":
            messages.pop()
        return out, mask

    def prompt(messages: Sequence[Mapping[str, Any]]) -> list[int]:
        start = messages[1:] if fault == "no system" else messages
        return tokens(list(start))[0] + head("assistant")

    return ChatTemplate(tokens, prompt, TALK, end=END)


def failed(subject: Any) -> set[str]:
    return {f.subject for f in audit(subject).failures}


def test_a_template_supervises_the_assistant_alone() -> None:
    assert audit(template()).holds and not failed(template())
    assert {"supervised share", "words of others"} <= failed(template("all"))
    assert failed(template("end")) == {"ends of answers"}
    assert failed(template("last")) == {"the assistant's words", "ends of answers"}


def test_a_prompt_is_the_beginning_of_what_is_trained_on() -> None:
    assert failed(template("no system")) == {"the prompt of message 2", "the prompt of message 4"}
    assert "the messages afterwards" in failed(template("writes"))


def test_a_mask_that_runs_on_over_the_next_question_is_seen() -> None:
    """A few tokens too many: only words in front of the question change what is supervised."""
    right = template()

    def tokens(messages: list[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
        out, mask = right.tokens(messages)
        return out, [int(any(mask[max(0, i - 6) : i + 1])) for i in range(len(mask))]

    assert "words of others" in failed(ChatTemplate(tokens, right.prompt, TALK, end=END))


def test_a_generation_prompt_is_not_supervised() -> None:
    """NeMo Automodel #3739: an empty block of reasoning, which the prompt already has, is trained."""
    assert failed(template("generation prompt")) == {"generation prompts"}


def grader(fault: str = "") -> Grader:
    calls = [0]

    def grade(answer: str) -> float:
        calls[0] += 1
        if fault == "nan" and not answer.strip():
            return float("nan")
        if fault == "empty" and not answer:
            return 1.0
        if fault == "state" and calls[0] > 4:
            return 0.0
        right = "4" in answer if fault == "loose" else answer.strip().endswith(" 4") or answer == "4"
        return float(right)

    return Grader(grade, ["4", "it is 4"], ["5", "41"], question="what is 4 + 0?")


def test_a_grader_pays_right_answers_alone() -> None:
    assert audit(grader()).holds and not failed(grader())
    assert failed(grader("loose")) == {"right above wrong"}
    assert failed(grader("empty")) == {"no answer"}
    assert "finite" in failed(grader("nan"))
    assert failed(grader("state")) == {"again"}


def test_answers_that_are_not_trained_by_design_are_declared() -> None:
    """A masked history (LLaMA-Factory #10827: the end of an earlier answer is still supervised)."""
    last = template("last")
    last.trained = (4,)
    assert audit(last).holds
    whole = template()
    whole.trained = (4,)
    assert failed(whole) == {"words of others", "turns that are not trained", "ends of answers"}
    inner = last.tokens

    def tokens(messages: list[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
        out, mask = map(list, inner(messages))
        ends = [k for k, token in enumerate(out) if token == END]
        return out, [1 if k in ends[1:-1:2] else on for k, on in enumerate(mask)]  # after the user's text, too

    last.tokens = tokens
    assert failed(last) == {"turns that are not trained", "ends of answers"}


def marked(fault: str, messages: list[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
    """The next user's marker (3) ends an answer, and the last answer has no end (GLM)."""
    out: list[int] = []
    mask: list[int] = []
    for i, m in enumerate(messages):
        own, after = m["role"] == "assistant", i > 0 and messages[i - 1]["role"] == "assistant"
        out += [4 if own else 3, *ids(m["content"])]
        mask += [int(after and fault != "end"), *[int(own)] * len(m["content"])]
    return out, mask


@pytest.mark.parametrize("talk", [TALK, TALK[:3]], ids=["two answers", "one"])
@pytest.mark.parametrize("fault", ["", "end"])
def test_an_answer_may_end_where_the_next_message_begins(fault: str, talk: list[Any]) -> None:
    subject = ChatTemplate(lambda m: marked(fault, m), lambda m: [*marked(fault, m)[0], 4], talk, end=3)
    (row,) = (f for f in audit(subject).findings if f.subject == "ends of answers")
    assert row.outcome == ("fails" if fault and talk is TALK else "warns")
    assert f"there is none of {len(talk) - 1}" in row.measured


@pytest.mark.parametrize("fault", ["", "the users' ends", "no end at all", "moved by one"])
def test_the_end_that_follows_an_answer_is_the_one(fault: str) -> None:
    right = template().tokens

    def tokens(messages: list[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
        out, mask = map(list, right(messages))
        if fault == "the users' ends":
            mask = [1 - on if token == END else on for token, on in zip(out, mask, strict=True)]
        if fault == "moved by one":
            mask = [*mask[1:], 0]
        keep = [not (fault == "no end at all" and token == END and on) for token, on in zip(out, mask, strict=True)]
        return [t for t, k in zip(out, keep, strict=True) if k], [o for o, k in zip(mask, keep, strict=True) if k]

    subject = ChatTemplate(tokens, lambda m: [*tokens(m)[0], 2, *ids("assistant")], TALK, end=END)
    assert ("ends of answers" in failed(subject)) == bool(fault)
