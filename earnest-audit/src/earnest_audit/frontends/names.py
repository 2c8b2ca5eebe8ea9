"""Guesses what a step's metrics are from their usual names, once, before the laws run; a declared fact is never guessed
over, and the verdict lists each guess."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from earnest_audit.edits import SIDES
from earnest_audit.facts import Metric
from earnest_audit.probe import Probe
from earnest_audit.step import Step

CLIPPED = ("clip_fraction", "clip_frac", "clipfrac", "clip_ratio")
CRITIC = {"value", "values", "critic", "vf"}  # in a path: the clipped share of a critic's values
TO_SAMPLER = ("approx_kl", "ppo_kl", "old_kl", "mismatch_kl")
TO_REFERENCE = ("kl", "ref_kl", "kl_ref", "reference_kl", "kl_loss", "kl_penalty")
RATIO = ("ratio", "ratio_mean", "mean_ratio")
SHARES = {"fraction", "frac", "clipfrac", "accuracy", "accuracies"}
NOT_SHARES = {"learning", "lr", "decay", "growth", "sampling", "token", "tokens", "step"}  # such rates may be anything
RATIOS = {"ratio", "prob", "probability", "importance", "likelihood", "policy", "clip"}  # of these, never below 0
ACCURACIES = {"accuracy", "accuracies", "acc"}
OF_PAIRS = {"rewards", "reward", "pair", "pairs", "preference", "accuracy", "accuracies", "train"}
MARGINS = {"margin", "margins"}
AVERAGES = {"kl", "entropy", "accuracy", "accuracies", "margin", "margins", "ratio", "clipfrac", "frac", "fraction",
            "nll", "perplexity", "ppl", "logp", "logps", "logprob", "logprobs", "loss"}  # fmt: skip
# Sums, extremes, spreads and lengths may depend on the rows or the padding.
APART = {"sum", "total", "count", "num", "tokens", "max", "min", "pad", "padding", "padded", "length", "len", "std",
         "var", "time", "step", "lr", "sec"}  # fmt: skip
SPREADS = {"mean", "avg", "min", "max"}  # what stands beside a name of these
NONE: frozenset[str] = frozenset()
UNSURE = frozenset({"moves"})


def metrics(step: Step, returned: Iterable[str]) -> dict[str, Metric]:
    """The facts of every metric that is declared or returned."""
    every = [*dict.fromkeys([*step.facts, *returned])]
    return {name: _facts(step, name, every) for name in every}


def notes(probe: Probe) -> tuple[str, ...]:
    """The guesses, where a law used them."""
    found: Mapping[str, Metric] = vars(probe).get("metrics", {})
    guesses = [f"{name} is {_a(m.kind)}" for name, m in found.items() if m.kind and not _declared(probe.step, name)]
    text = f"guessed from names: {', '.join(guesses)}; metrics={{name: Metric(kind=…)}} declares it"
    return (text,) if guesses else ()


def _a(kind: str) -> str:
    return kind if kind.endswith("log-probs") else f"an {kind}" if kind[0] in "ae" else f"a {kind}"


def _declared(step: Step, name: str) -> bool:
    return name in step.facts and step.facts[name].kind is not None


def _facts(step: Step, name: str, every: list[str]) -> Metric:
    if _declared(step, name):
        return step.facts[name].whole
    guess, own, words = _guess(step, name, every), step.facts.get(name), _words(name)
    if own is None:
        return replace(guess, average=bool(words & AVERAGES) and not words & APART)
    average = bool(own.weight or own.moves or words & AVERAGES) and not words & APART
    return replace(
        own, kind=guess.kind, neutral=guess.neutral if own.neutral is None else own.neutral, of=own.of or guess.of,
        average=average if own.average is None else own.average, unsure=guess.unsure - UNSURE,
    )  # fmt: skip


def _guess(step: Step, name: str, every: list[str]) -> Metric:
    *path, last = name.lower().split("/")
    words = [w for w in _split(name) if w not in SPREADS]
    own, pairs = set(words), step.kind == "preference" or step.roles.keys() >= set(SIDES)
    if last in CLIPPED and not CRITIC & set(path):
        sizes = [step.knobs.get(n) for n, kind in step.kinds.items() if kind == "clip"]
        clips = step.ratio_role in step.roles and any(isinstance(v, float) and 0 < v < 1 for v in sizes)
        return Metric(0.0, 1.0, neutral=0.0, kind="clipped share", unsure=NONE if clips else UNSURE)
    if last in TO_SAMPLER:
        return Metric(kind="kl to the sampler", neutral=0.0, moves=False)
    if last in RATIO and "clip" not in own:
        return Metric(0.0, kind="ratio", neutral=1.0, unsure=UNSURE)
    if pairs and own & ACCURACIES:
        return _accuracy(own)
    if pairs and own & MARGINS:
        return _margin(name, every)
    if pairs and re.search(r"log_?p", name.lower()) and len(sides := [s for s in SIDES if s in name.lower()]) == 1:
        kind = "chosen log-probs" if sides == ["chosen"] else "rejected log-probs"
        return Metric(kind=kind, moves=False, unsure=frozenset({"kind"}))  # type: ignore[arg-type]
    if own & SHARES or (words[-1:] == ["rate"] and not own & NOT_SHARES):
        return Metric(0.0, 1.0, kind="share", unsure=UNSURE)
    if words[-1:] == ["ratio"] and own <= RATIOS:
        return Metric(0.0, 1.0 if "clip" in own else None, kind="share" if "clip" in own else "ratio", unsure=UNSURE)
    if "kl" in name.lower() and not any(w in name.lower() for w in ("approx", "ppo", "old", "mismatch")):
        if "reference" in step.roles and (name in step.weights or last in TO_REFERENCE):
            return Metric(kind="kl to the reference", moves=False)
    if step.kind == "policy gradient" and "entropy" in name.lower() and "cross" not in name.lower():
        return Metric(kind="entropy", moves=False)
    return Metric(moves=False)


def _accuracy(words: set[str]) -> Metric:
    unsure = NONE if words <= OF_PAIRS else UNSURE
    return Metric(0.0, 1.0, kind="accuracy", unsure=unsure) if words & SHARES else Metric(moves=False, kind="accuracy")


def _margin(name: str, every: list[str]) -> Metric:
    """The difference of two metrics with its other words; or, which is not sure, of the only two that have them
    all."""
    rest, words = _words(name) - MARGINS, {n: _words(n) for n in every}
    both = [(c, r) for c, w in words.items() for r, v in words.items()
            if rest <= w and "chosen" in w and v == w ^ set(SIDES)]  # fmt: skip
    exact = [pair for pair in both if words[pair[0]] == rest | {"chosen"}]
    of = exact[0] if exact else both[0] if len(both) == 1 else None
    return Metric(kind="margin", moves=False, of=of, unsure=NONE if exact else frozenset({"of"}))


def _words(name: str) -> set[str]:
    return set(_split(name))


def _split(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z]+", name.lower()) if word]
