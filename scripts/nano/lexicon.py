"""The small world of nano's plain sentences: words, who can do what, and a grammar over them."""

from __future__ import annotations

import random
from collections.abc import Callable

from earnest.tasks.split import split_of

PEOPLE = {
    "Anna": "she",
    "Tom": "he",
    "Mia": "she",
    "Paul": "he",
    "Lena": "she",
    "Max": "he",
    "the baker": "he",
    "the teacher": "she",
}
ANIMALS = ("fox", "cat", "dog", "horse", "bird", "mouse", "bear", "owl", "fish", "goat", "duck", "frog")
ANIMAL_LOOKS = ("small", "grey", "brown", "quick", "old", "shy", "young", "quiet", "hungry", "clever")
ANIMAL_ACTS = ("sleeps", "runs", "waits", "hides", "rests", "plays", "jumps", "listens")
THINGS = ("lamp", "basket", "book", "bread", "chair", "clock", "boat", "coat", "letter", "apple", "stone", "window")
THING_LOOKS = ("red", "heavy", "new", "broken", "wooden", "warm", "blue", "simple", "round", "old")
PERSON_ACTS = ("carries", "finds", "paints", "sells", "repairs", "brings", "keeps", "forgets")
PLACES = (
    "river",
    "garden",
    "forest",
    "house",
    "market",
    "bridge",
    "field",
    "village",
    "hill",
    "road",
    "lake",
    "island",
)
PLACE_LOOKS = ("wide", "green", "old", "long", "empty", "busy", "dark", "quiet")
NEAR = ("near the", "behind the", "by the", "beyond the")
TIMES = ("in the morning", "at night", "in winter", "in summer", "every day", "after the rain", "before noon", "today")
WEATHER = ("it rains", "the wind blows", "the sun shines", "snow falls", "the moon is up", "it is cold")
NATURE = ("rain", "snow", "wind", "sun", "moon", "night", "winter", "summer", "song", "tree", "fire", "sea")
NATURE_LOOKS = ("soft", "cold", "bright", "long", "quiet", "strong", "clear", "gentle")


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def a_or_an(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def looks_of(noun: str) -> tuple[str, ...]:
    """The adjectives that suit a noun; other pairs never occur, which is part of what a language model can learn."""
    if noun in ANIMALS:
        return ANIMAL_LOOKS
    if noun in THINGS:
        return THING_LOOKS
    return PLACE_LOOKS if noun in PLACES else NATURE_LOOKS


def place(rng: random.Random) -> str:
    return f"{rng.choice(NEAR)} {rng.choice(PLACES)}"


def _animal(rng: random.Random) -> tuple[str, str, Callable[[str], str]]:
    noun = rng.choice(ANIMALS)
    name = f"the {rng.choice(ANIMAL_LOOKS)} {noun}"
    return name, "it", lambda who: f"{who} {rng.choice(ANIMAL_ACTS)} {place(rng)}"


def _person(rng: random.Random) -> tuple[str, str, Callable[[str], str]]:
    name, pronoun = rng.choice(list(PEOPLE.items()))

    def act(who: str) -> str:
        noun = rng.choice(THINGS)
        return f"{who} {rng.choice(PERSON_ACTS)} the {rng.choice(THING_LOOKS)} {noun}"

    return name, pronoun, act


def sentence(rng: random.Random, who: str, act: Callable[[str], str]) -> str:
    form = rng.randrange(5)
    if form == 0:
        return _capital(f"{act(who)}.")
    if form == 1:
        return _capital(f"{act(who)} {rng.choice(TIMES)}.")
    if form == 2:
        return _capital(f"when {rng.choice(WEATHER)}, {act(who)}.")
    if form == 3:
        return _capital(f"{act(who)} and {rng.choice(('smiles', 'looks up', 'is tired', 'is happy'))}.")
    return _capital(f"{rng.choice(TIMES)} {act(who)}.")


def scene(rng: random.Random) -> str:
    noun = rng.choice(THINGS)
    spot = rng.choice(PLACES)
    return rng.choice(
        (
            f"There is {a_or_an(rng.choice(THING_LOOKS))} {noun} {place(rng)}.",
            f"The {spot} is {rng.choice(PLACE_LOOKS)} {rng.choice(TIMES)}.",
            f"The {rng.choice(THING_LOOKS)} {noun} lies {place(rng)}.",
        )
    )


def plain(rng: random.Random, split: str = "train", sentences: int | None = None) -> str:
    """A short text about one subject, named first and then by its pronoun; every sentence of it is of the split."""
    who, pronoun, act = rng.choice((_animal, _person))(rng)
    total = sentences or rng.randint(2, 5)
    out: list[str] = []
    while len(out) < total:
        candidate = scene(rng) if out and rng.random() < 0.2 else sentence(rng, pronoun if out else who, act)
        if split_of(f"plain|{candidate}") == split:
            out.append(candidate)
    return " ".join(out)
