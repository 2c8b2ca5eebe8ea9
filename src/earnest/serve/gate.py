"""The gate: the measures that a new version must pass before it becomes live.

    margin            Σ log π(chosen) - Σ log π(rejected), held-out pairs; against the version that is live
    entropy ratio     H(candidate's answers to the probes) / H(base's)
    self-similarity   mean ROUGE-L (Lin, 2004) between a model's answers to one probe
    drift             mean over the base's own answers of |log π_base - log π_candidate|, nats per token

A measure without data is *not applicable*, never a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from earnest.engines import LocalEngine
from earnest.models import SampleSpec
from earnest.objectives.needs import Entropy, LogProb
from earnest.serve.decode import Request, decode
from earnest.serve.learning import GateConfig
from earnest.serve.scoring import answer_tokens
from earnest.serve.state import State
from earnest.signals import Batch
from earnest_audit.verdict import Finding, Verdict


@dataclass(frozen=True)
class ProbeAnswers:
    """A model's answers to the probes, and their statistics."""

    prompts: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[tuple[int, ...], ...], ...]
    entropy: float
    similarity: float


def rouge_l(a: Sequence[str], b: Sequence[str]) -> float:
    """F1 of the longest common subsequence, in words; two empty texts are the same."""
    if not a or not b:
        return float(list(a) == list(b))
    row = [0] * (len(b) + 1)
    for x in a:
        before = 0
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], before + 1 if x == y else max(row[j], row[j - 1])
    return 2 * row[-1] / (len(a) + len(b))


def self_similarity(texts: Sequence[Sequence[str]]) -> float:
    """The mean over prompts of the mean ROUGE-L over pairs of answers."""
    return fmean(fmean(rouge_l(a.split(), b.split()) for a, b in combinations(answers, 2)) for answers in texts)


def probe(
    state: State, engine: LocalEngine, config: GateConfig, yield_turn: Callable[[], None], *, base: bool
) -> ProbeAnswers:
    """Sample the probes' answers (base: with the adapter's gate at 0) and measure them."""
    prompts = tuple(state.text.render([{"role": "user", "content": p}]) for p in config.prompts)
    spec = SampleSpec(max_new_tokens=config.max_new_tokens, seed=1)
    adapter = None if base else engine.adapter
    requests = [Request(p, spec, adapter, config.samples) for p in prompts]
    answers = tuple(tuple(done.tokens for done in own) for own in decode(state.host, requests, yield_turn))
    texts = [[state.text.decode(tokens) for tokens in own] for own in answers]
    batch = _batch(state, prompts, answers)
    with state.host.only(adapter):
        entropy = engine.scalars(batch, [Entropy()])[Entropy()].values
    return ProbeAnswers(prompts, answers, float(entropy.mean()), self_similarity(texts))


def _batch(state: State, prompts: Sequence[tuple[int, ...]], answers: Sequence[Sequence[tuple[int, ...]]]) -> Batch:
    rows = [(p, a) for p, own in zip(prompts, answers, strict=True) for a in own]
    policy = state.host.policy
    return Batch.from_rows([p for p, _ in rows], [a for _, a in rows], pad=policy.pad_id, device=policy.device)


def margin(state: State, engine: LocalEngine, config: GateConfig) -> float | None:
    """The mean held-out margin of the policy as it is now; None without pairs."""
    if not config.pairs:
        return None
    prompts, answers = [], []
    for pair in config.pairs:
        messages = [{"role": "user", "content": pair.prompt}]
        for said in (pair.chosen, pair.rejected):
            prompt, tokens = answer_tokens(state, messages, said)
            prompts.append(prompt)
            answers.append((tokens,))
    batch = _batch(state, prompts, answers)
    logprob = engine.scalars(batch, [LogProb()])[LogProb()].values
    sums = logprob.new_zeros(len(batch)).index_add(0, batch.row, logprob)
    return float((sums[0::2] - sums[1::2]).mean())


def judge(
    state: State,
    engine: LocalEngine,
    config: GateConfig,
    base: ProbeAnswers,
    before: float | None,
    yield_turn: Callable[[], None],
) -> tuple[Verdict, dict[str, float]]:
    """The gate's verdict on the policy as it is now, and its numbers; ``before`` is the live version's margin."""
    now = probe(state, engine, config, yield_turn, base=False)
    texts = _batch(state, base.prompts, base.answers)
    candidate = engine.scalars(texts, [LogProb()])[LogProb()].values
    with engine.adapter.off():
        reference = engine.scalars(texts, [LogProb()])[LogProb()].values
    drift = float((reference - candidate).abs().mean())
    ratio = now.entropy / base.entropy if base.entropy > 0 else 1.0
    after = margin(state, engine, config)
    numbers = {
        "entropy": now.entropy,
        "entropy_ratio": ratio,
        "self_similarity": now.similarity,
        "self_similarity_base": base.similarity,
        "drift": drift,
    }
    findings = [
        _margin(before, after, config.margin),
        _finding(
            "entropy ratio",
            f"{ratio:.3g}",
            f"{config.entropy_ratio:g} to {config.entropy_most:g}",
            config.entropy_ratio <= ratio <= config.entropy_most,
            "Answers to unrelated questions have become far more certain than the base's (the policy collapses), "
            "or far less (they are near random).",
        ),
        _finding(
            "self-similarity",
            f"{now.similarity:.3g} (base {base.similarity:.3g})",
            f"at most {config.self_similarity:g}",
            now.similarity <= max(config.self_similarity, base.similarity),
            "Different samples for one question are nearly the same: the policy collapses.",
        ),
        _finding(
            "log-prob drift",
            f"{drift:.3g} nats per token",
            f"at most {config.drift:g}",
            drift <= config.drift,
            "The log-probs of the base's own answers have moved far, up or down: the update changed too much.",
        ),
    ]
    if after is not None:
        numbers |= {"margin": after, "margin_change": after - (before or 0.0)}
    return Verdict(tuple(findings)), numbers


def _finding(what: str, measured: str, expected: str, holds: bool, meaning: str) -> Finding:
    return Finding("gate", what, measured, expected, "holds" if holds else "fails", meaning)


def _margin(before: float | None, after: float | None, room: float) -> Finding:
    what, most = "held-out margin", f"loses at most {room:g}"
    if before is None or after is None:
        return Finding("gate", what, "no pairs", most, "not applicable", "gate.pairs is empty.")
    return _finding(
        what,
        f"{before:.3g} → {after:.3g} nats",
        most,
        after >= before - room,
        "On the held-out pairs the wanted answer has become less likely against the unwanted one.",
    )
