"""Guesses what a step's settings and metrics are from their usual names, once, before the laws run; what is declared
stays, and the verdict lists each guess, also those of the batch that the laws make."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from earnest_audit import edits
from earnest_audit.edits import SIDES
from earnest_audit.facts import DIRECTIONS, READ_BY, Kind, Metric, MetricKind, Setting
from earnest_audit.probe import Probe
from earnest_audit.step import Step

# The usual names of each kind of setting, and nothing less: smooth_eps, huber_delta, reward_clip and cliprange_value
# are others.
SETTINGS: dict[Kind, tuple[str, ...]] = {
    "clip": ("clip", "clip_low", "eps", "epsilon", "epsilon_low", "eps_low", "clip_eps", "clip_epsilon", "clip_range",
             "clip_range_low", "cliprange", "cliprange_low", "eps_clip", "eps_clip_low", "clip_ratio",
             "clip_ratio_low"),
    "clip high": ("clip_high", "epsilon_high", "eps_high", "clip_range_high", "cliprange_high", "eps_clip_high",
                  "clip_ratio_high"),
    "bound": ("delta", "dual_clip", "clip_dual", "clip_ratio_c", "importance_clip"),
    "target": ("gamma", "simpo_gamma", "gamma_beta_ratio", "margin", "target_margin", "offset"),
    "smoothing": ("label_smoothing", "label_smoothing_factor", "smoothing"),
    "mixture": ("alpha", "beta", "jsd_beta", "jsd_alpha"),
}  # fmt: skip
MODES: dict[str, Kind] = {  # of an option whose modes have the names of both
    **dict.fromkeys(("forward_kl", "forward", "fkl", "kl_forward"), "forward kl"),
    **dict.fromkeys(("reverse_kl", "reverse", "rkl", "kl_reverse"), "reverse kl"),
}
CLIPPED = ("clip_fraction", "clip_frac", "clipfrac", "clip_ratio")
CRITIC = {"value", "values", "critic", "vf"}  # in a path: the clipped share of a critic's values
TO_SAMPLER = ("approx_kl", "ppo_kl", "old_kl", "mismatch_kl")
TO_OTHERS = {"approx", "ppo", "old", "mismatch"}  # in a name: a KL to another policy than the reference
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
MOVES = frozenset({"moves"})


def settings(step: Step) -> Step:
    """The step with a kind for every plain number, and every option, whose names are usual ones."""
    more = {name: replace(step.declared[name], kind=kind, guessed=True) for name, kind in _guessed(step).items()}
    return replace(step, settings={**step.settings, **more}) if more else step


def metrics(step: Step, returned: Iterable[str]) -> dict[str, Metric]:
    """The facts of every metric that is declared or returned."""
    every = [*dict.fromkeys([*step.facts, *returned])]
    return {name: _facts(step, name, every) for name in every}


def notes(step: Step, probe: Probe) -> Iterator[str]:
    """The guesses that laws used. ``step``: as it was declared."""
    kinds = {n: k for n, k in _guessed(step).items() if READ_BY[k] == step.kind and n not in step.terms_off}
    found: Mapping[str, Metric] = vars(probe).get("metrics", {})
    metrics = {name: m.kind for name, m in found.items() if m.kind and not _declared(step, name)}
    for guesses, how in ((kinds, "settings={name: Setting(value, kind)}"), (metrics, "metrics={name: Metric(kind=…)}")):
        if guesses:
            named = ", ".join(f"{name} is {_a(kind)}" for name, kind in guesses.items())
            yield f"guessed from names: {named}; {how} declares it"
    if step.kind == "preference" and (sides := step.named_sides[0]):
        pairs = ", ".join(f"{c} and {r}" for c, r in sides.items())
        yield f"guessed from names: {pairs} belong to the two answers; roles={{role: key}} declares it"
    yield from _of_the_batch(step)


def _of_the_batch(step: Step) -> Iterator[str]:
    """What laws assume of this batch because of its roles, shapes and values."""
    padded, teacher = edits.readings(step), step.value("teacher")
    if step.family is None and step.kind is not None:
        yield f'guessed from roles: the family is "{step.kind}"; family="…" declares it'
    if step.wide is None and len(padded) > 1 and (more := sorted(padded[0] - padded[-1])):
        yield f"guessed from shapes: {', '.join(more)} is padded with the rows; wide=(…) declares it"
    if masks := [k for k in sorted(padded[0]) if k not in step.masks and edits.mask_like(step, k, step.batch[k])]:
        yield f"guessed from values: {', '.join(masks)} is a mask, 0 in padding; a role or masks=(…) declares it"
    if edits.by_attention(step):
        yield "guessed from values: the loss is taken where the attention mask is not 0; the role mask declares it"
    if edits.in_place(step) or edits.ahead(step):
        where = "their tokens stand" if edits.in_place(step) else "they are predicted"
        yield f"guessed from values: labels stand where {where}"
    if teacher is not None and teacher.is_floating_point():
        form = (
            "log-probs" if edits.log_like(teacher) else "probabilities" if edits.probability_like(teacher) else "logits"
        )
        yield f"guessed from values: the teacher gives {form}"


def declared(values: Mapping[str, Any]) -> dict[str, Setting]:
    """For a front-end that knows its own names: each setting with the kind of its name."""
    kinds = _usual(values)
    return {name: Setting(value, kinds.get(name, "setting")) for name, value in values.items()}


def _guessed(step: Step) -> dict[str, Kind]:
    plain = {name: value for name, value in step.settings.items() if not isinstance(value, Setting)}
    modes = {n: kind for n in step.options if step.kinds[n] == "setting" and (kind := _mode(step, n))}
    return _usual(plain) | modes


def _mode(step: Step, option: str) -> Kind | None:
    """Of an option's present mode, which comes first."""
    named = [MODES.get(str(mode).lower().replace("-", "_")) for mode in step.options[option]]
    return named[0] if set(DIRECTIONS) <= set(named) else None


def _usual(values: Mapping[str, Any]) -> dict[str, Kind]:
    """name -> kind, of settings whose last name (``grpo.clip``) is a usual one and whose value is a float."""
    short = {name: name.lower().rsplit(".", 1)[-1] for name, value in values.items() if isinstance(value, float)}
    return {name: kind for name, last in short.items() for kind, names in SETTINGS.items() if last in names}


def _a(kind: str) -> str:
    return kind if kind.endswith("log-probs") else f"an {kind}" if kind[0] in "ae" else f"a {kind}"


def _declared(step: Step, name: str) -> bool:
    return name in step.facts and step.facts[name].kind is not None


def _facts(step: Step, name: str, every: list[str]) -> Metric:
    if _declared(step, name):
        return step.facts[name]
    guess, own, words = _guess(step, name, every), step.facts.get(name), _words(name)
    if own is None:
        return replace(guess, average=bool(words & AVERAGES) and not words & APART)
    average = bool(own.weight or own.moves or words & AVERAGES) and not words & APART
    fields = ("low", "high", "neutral", "average", "of")
    given = {field: value for field in fields if (value := getattr(own, field)) is not None}
    found = replace(guess, moves=own.moves, weight=own.weight, raises=own.raises, unsure=guess.unsure - {"moves"})
    return replace(found, **{"average": average, **given})


def _guess(step: Step, name: str, every: list[str]) -> Metric:
    *path, last = name.lower().split("/")
    words = [word for word in _split(name) if word not in SPREADS]
    own, pairs = set(words), step.kind == "preference" or step.roles.keys() >= set(SIDES)
    if last in CLIPPED and not CRITIC & set(path):
        sizes = [step.knobs.get(n) for n, kind in step.kinds.items() if kind == "clip"]
        clips = step.ratio_role in step.roles and any(isinstance(v, float) and 0 < v < 1 for v in sizes)
        return Metric(kind="clipped share", unsure=NONE if clips else MOVES)
    if last in TO_SAMPLER:
        return Metric(kind="kl to the sampler", moves=False)
    if last in RATIO and "clip" not in own:
        return Metric(kind="ratio", unsure=MOVES)
    if pairs and own & ACCURACIES:
        percent, unsure = "acc" in own, NONE if own <= OF_PAIRS else MOVES  # it may be one
        return Metric(high=math.inf if percent else None, moves=not percent, kind="accuracy", unsure=unsure)
    if pairs and own & MARGINS:
        return _margin(name, every)
    if pairs and re.search(r"log_?p", name.lower()) and len(sides := [s for s in SIDES if s in name.lower()]) == 1:
        kinds: tuple[MetricKind, MetricKind] = ("chosen log-probs", "rejected log-probs")
        return Metric(kind=kinds[SIDES.index(sides[0])], moves=False, unsure=frozenset({"kind"}))
    if own & SHARES or (words[-1:] == ["rate"] and not own & NOT_SHARES) or own == {"clip", "ratio"}:
        return Metric(kind="share", unsure=MOVES)
    if words[-1:] == ["ratio"] and own <= RATIOS:
        return Metric(kind="ratio", unsure=MOVES | {"neutral"})
    if last in TO_REFERENCE or (name in step.weights and "kl" in name.lower() and not own & TO_OTHERS):
        return Metric(kind="kl to the reference" if "reference" in step.roles else None, moves=False)
    if step.kind == "policy gradient" and "entropy" in name.lower() and "cross" not in name.lower():
        return Metric(kind="entropy", moves=False)
    return Metric(moves=False)


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
