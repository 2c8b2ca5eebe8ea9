"""Why a sampler's log-probs of its own tokens are not the trainer's: the cases that have a name."""

from __future__ import annotations

from collections.abc import Mapping

from earnest.sync.probe import Logprobs, apart

RAW = (
    "They are those before temperature: vLLM reports these unless it is started with --logprobs-mode "
    "processed_logprobs."
)
BASE = "They are those of the base model: the adapter is not applied to what is sampled."
OLD = (
    "They are those of the weights before the last push: the sampler computes on old weights or on a KV cache that "
    "they filled (a prefix cache that is not cleared by an update)."
)
TRUNCATED = (
    "All are too high, so the sampler leaves tokens out by a top-p, top-k or min-p that was not requested; look for "
    "defaults in its generation_config, and turn them off."
)
UNKNOWN = "They fit neither the raw nor the base distribution; it runs other weights, another tokenizer or a penalty."


def reason(theirs: Logprobs, own: Logprobs, others: Mapping[str, Logprobs], allowed: float) -> str:
    """A sentence for log-probs that are off ``own``: the sentence of the first of ``others`` that they match."""
    for sentence, values in others.items():
        if apart(theirs, values) <= allowed:
            return sentence
    if bool((theirs >= own - allowed).all()):
        return TRUNCATED
    return UNKNOWN
