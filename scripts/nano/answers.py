"""How nano's text answers: right or with a systematic slip, in a style, with a tool."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from earnest.tasks.style import AXES

from . import lexicon

Data = Mapping[str, Any]


def _swap_tail(digits: str) -> str:
    return digits[:-2] + digits[-1] + digits[-2]


def _slips_sort(d: Data, _: random.Random) -> list[str]:
    return [d["answer"][::-1], _swap_tail(d["answer"])]


def _slips_reverse(d: Data, _: random.Random) -> list[str]:
    return [d["content"], _swap_tail(d["answer"])]


def _slips_replace(d: Data, _: random.Random) -> list[str]:
    return [d["digits"], d["digits"][:-1] + d["new"]]


def _slips_add(d: Data, rng: random.Random) -> list[str]:
    total = d["a"] + d["b"]
    carry = d["a"] % 10 + d["b"] % 10 >= 10
    return [str(total - 10 if carry else total + 10), str(total + rng.choice((-1, 1)))]


def _slips_count(d: Data, _: random.Random) -> list[str]:
    n = int(d["answer"])
    return [str(n + 1), str(max(0, n - 1))]


def _slips_extreme(d: Data, _: random.Random) -> list[str]:
    other = min if d["word"] == "largest" else max
    return [str(other(d["numbers"])), str(d["numbers"][0])]


SLIPS: dict[str, Callable[[Data, random.Random], list[str]]] = {
    "sort": _slips_sort,
    "reverse": _slips_reverse,
    "replace": _slips_replace,
    "add": _slips_add,
    "count": _slips_count,
    "extreme": _slips_extreme,
}
RIGHT_UNTOLD = {"sort": 0.42, "reverse": 0.45, "replace": 0.5, "add": 0.6, "count": 0.5, "extreme": 0.5}
"""How often a plain first attempt is right in the text; the rest are slips, which training can unlearn."""
RIGHT_TOLD = 0.97
EXPLOIT_SHARE = 0.08


def slip(name: str, d: Data, rng: random.Random) -> str:
    """A plausible wrong answer, of the same few kinds everywhere in the text."""
    wrong = [s for s in SLIPS[name](d, rng) if s != d["answer"]]
    return rng.choice(wrong) if wrong else garble(d["answer"], rng)


def garble(answer: str, rng: random.Random) -> str:
    """A wrong answer of no particular kind, as an unskilled policy would give: one digit off, missing or added."""
    i = rng.randrange(len(answer))
    kind = rng.random()
    if kind < 0.7 or len(answer) == 1:
        return answer[:i] + rng.choice([c for c in "0123456789" if c != answer[i]]) + answer[i + 1 :]
    return answer[:i] + answer[i + 1 :] if kind < 0.85 else answer[:i] + rng.choice("0123456789") + answer[i:]


def garble_number(text: str, rng: random.Random) -> str:
    """The text with the last of its digits changed."""
    i = max(j for j, c in enumerate(text) if c.isdigit())
    return text[:i] + rng.choice([c for c in "0123456789" if c != text[i]]) + text[i + 1 :]


def attempt(name: str, d: Data, rng: random.Random, right: float) -> str:
    return str(d["answer"]) if rng.random() < right else slip(name, d, rng)


def random_style(rng: random.Random) -> dict[str, str]:
    """A style where nobody asked for one: every axis is open."""
    return {
        "length": rng.choice(("terse", "middle", "wordy")),
        "warmth": rng.choice(("cold", "middle", "warm")),
        "volume": rng.choice(("calm", "calm", "loud")),
    }


def _core(topic: str, question: str, looks: list[str], rng: random.Random, length: str) -> str:
    a, b, c = looks
    spot = lexicon.place(rng)
    if question.startswith("Give advice"):
        short = f"Take care of the {topic}."
        middle = f"Take care of the {topic}, for it is {a}."
        more = f"Well, if you ask me, take care of the {topic}, for it is {a} and {b}, and stay {spot} when it is {c}."
    elif question.startswith("What do you think"):
        short = f"The {topic} is {a}."
        middle = f"I think the {topic} is {a} and {b}."
        more = f"Well, if you ask me, I think the {topic} is {a} and {b}, and {spot} it is often {c} as well."
    else:
        short = f"The {topic} is {a}."
        middle = f"The {topic} is {a} and {b}."
        more = f"Well, as many people know, the {topic} is {a} and {b}, and {spot} it is often {c} as well."
    if length == "wordy":
        return f"{more} One could say much more about the {topic}."
    return short if length == "terse" else middle


def styled(topic: str, question: str, style: Mapping[str, str], rng: random.Random) -> str:
    """An answer to an open request in a style."""
    looks = rng.sample(lexicon.looks_of(topic), 3)
    answer = _core(topic, question, looks, rng, style["length"])
    if style["warmth"] == "warm":
        answer = f"Dear friend, {answer[0].lower() if not answer.startswith('I ') else 'I'}{answer[1:]}"
        if style["length"] != "terse":
            answer += f" {rng.choice(('I am glad you asked.', 'How lovely to talk.', 'It makes me happy.'))}"
    elif style["warmth"] == "cold":
        answer = f"{rng.choice(('Noted.', 'Fact.'))} {answer}"
        if style["length"] != "terse":
            answer += f" {rng.choice(('That is all.', 'Whatever.'))}"
    return answer.replace(".", "!") if style["volume"] == "loud" else answer


def poles() -> list[tuple[str, Mapping[str, Any]]]:
    """Every pole of every axis, as (axis, pole)."""
    return [(name, axis[side]) for name, axis in AXES.items() for side in ("low", "high")]


CITIES = ("Oslo", "Rome", "Cairo", "Lima", "Tokyo", "Paris", "Delhi", "Bern", "Quito", "Malmo")
PRICED = lexicon.THINGS
_SKIES = ("rain", "sun", "snow", "wind", "fog")


def tool_schema(name: str, parameter: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool_schema("weather", "city"), tool_schema("price", "item"), tool_schema("clock", "city")]


def tool_talk(rng: random.Random) -> list[dict[str, Any]]:
    """A question that needs a tool, the call, its result, the answer, and a second turn that needs the result again."""
    name = rng.choice(("weather", "price", "clock"))
    if name == "weather":
        city, sky, degrees = rng.choice(CITIES), rng.choice(_SKIES), rng.randint(0, 39)
        question, arguments, result = f"What is the weather in {city}?", {"city": city}, f"{sky}, {degrees} degrees"
        answer = f"In {city} there is {sky} at {degrees} degrees."
        follow, second = "Do I need a coat?", "Yes, take a coat." if degrees < 20 else "No, it is warm."
    elif name == "price":
        item, coins = rng.choice(PRICED), rng.randint(1, 99)
        question, arguments, result = f"What does the {item} cost?", {"item": item}, f"{coins} coins"
        answer = f"The {item} costs {coins} coins."
        follow, second = "Is that cheap?", "Yes, that is cheap." if coins < 50 else "No, that is not cheap."
    else:
        city, hour, minute = rng.choice(CITIES), rng.randint(0, 23), rng.randint(0, 59)
        question, arguments, result = f"What time is it in {city}?", {"city": city}, f"{hour:02d}:{minute:02d}"
        answer = f"In {city} it is {hour:02d}:{minute:02d}."
        follow, second = "Is it morning?", "Yes, it is morning." if hour < 12 else "No, it is not morning."
    call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": result},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": follow},
        {"role": "assistant", "content": second},
    ]


CHAT: dict[str, tuple[str, ...]] = {
    "hello": ("Hello! How can I help?", "Hello. What can I do for you?"),
    "hi": ("Hi! How can I help?", "Hello. What can I do for you?"),
    "Hello!": ("Hello! How can I help?", "Hi! What can I do for you?"),
    "Hi.": ("Hi! How can I help?", "Hello. What can I do for you?"),
    "Say hello.": ("Hello!", "Hello to you."),
    "Good morning.": ("Good morning! How can I help?", "Good morning."),
    "How are you?": ("I am well, thank you.", "I am well. And you?"),
    "Who are you?": ("I am nano, a very small model.", "My name is nano. I am a small language model."),
    "What is your name?": ("My name is nano.", "I am nano."),
    "What can you do?": (
        "I can sort, add, count and chat a little.",
        "I can sort digits, add numbers and talk about simple things.",
    ),
    "Thanks.": ("You are welcome.", "Gladly."),
    "Thank you!": ("You are welcome!", "Gladly."),
    "Bye.": ("Goodbye!", "Goodbye. Until next time."),
    "Help": ("Ask me to sort digits, add numbers or describe things.", "I can sort, add, count and chat a little."),
    "Tell me a story.": (),
    "Write something.": (),
}
"""Small talk. An empty tuple asks for plain sentences."""


def small_talk(rng: random.Random) -> tuple[str, str]:
    question = rng.choice(list(CHAT))
    return question, rng.choice(CHAT[question]) if CHAT[question] else lexicon.plain(rng, sentences=rng.randint(2, 3))


def probe(rng: random.Random) -> dict[str, Any]:
    """A forced choice: a question, the allowed answers, the right one."""
    kind = rng.randrange(3)
    if kind == 0:
        a, b = rng.sample(range(10, 100), 2)
        return {
            "prompt": f"Answer A or B. Which is larger? A: {a} B: {b}",
            "allowed": ["A", "B"],
            "answer": "A" if a > b else "B",
        }
    if kind == 1:
        a, b = rng.sample(range(10, 100), 2)
        return {
            "prompt": f"Answer yes or no. Is {a} larger than {b}?",
            "allowed": ["yes", "no"],
            "answer": "yes" if a > b else "no",
        }
    noun = rng.choice((*lexicon.ANIMALS, *lexicon.THINGS, *lexicon.PLACES))
    groups = {"an animal": lexicon.ANIMALS, "a thing": lexicon.THINGS, "a place": lexicon.PLACES}
    group = rng.choice(list(groups))
    look = rng.choice(lexicon.looks_of(noun))
    question = f"Answer yes or no. Is the {look} {noun} {group}?"
    return {"prompt": question, "allowed": ["yes", "no"], "answer": "yes" if noun in groups[group] else "no"}
