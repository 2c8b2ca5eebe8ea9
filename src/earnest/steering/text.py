"""Checks of a text by its characters: repetition, and phrases that do not answer the question."""

from __future__ import annotations

import re

NARRATION: tuple[str, ...] = (
    *("as requested", "as you asked me to", "here is a", "here is my", "i am asked to", "i have been asked"),
    *("i will answer in", "i will now", "in the style of", "let me answer", "my instructions", "system prompt"),
    *("the assistant", "the user"),
)
REFUSAL: tuple[str, ...] = (
    *("as a language model", "as an ai", "i am not able to", "i am sorry", "i am unable", "i can not", "i cannot"),
    *("i can't", "i do not have the ability", "i won't", "i'm not able to", "i'm sorry", "i'm unable"),
)


def word_repetition(text: str, n: int = 3) -> float:
    """The share of word n-grams that occurred before; 0 for a text without repetition or shorter than n words."""
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def char_repetition(text: str, longest: int = 12, times: int = 3) -> float:
    """The share of characters in the longest run that repeats a piece of up to ``longest`` characters at least
    ``times``
    times: "!!!!!", "hahahaha"."""
    best = 0
    for period in range(1, longest + 1):
        run = 0
        for i in range(period, len(text)):
            run = run + 1 if text[i] == text[i - period] else 0
            if run >= period * (times - 1):
                best = max(best, run + period)
    return best / len(text) if text else 0.0


def says(text: str, phrases: tuple[str, ...]) -> str | None:
    """The first of the phrases that the text contains as whole words, or None."""
    low = " ".join(text.lower().replace("’", "'").split())
    return next((p for p in phrases if re.search(rf"(?<!\w){re.escape(p)}(?!\w)", low)), None)
