"""Why a sampler's log-probs of its own tokens are not the trainer's: the cases that have a name."""

from __future__ import annotations

from collections.abc import Mapping

from earnest.sync.probe import Logprobs, apart

MODE = "vLLM reports them before temperature unless it is started with --logprobs-mode processed_logprobs."
RAW = f"They are those before temperature. {MODE}"
BASE = "They are those of the base model: the adapter is not applied to what is sampled."
OLD = (
    "They are those of the weights before the last push: the sampler computes on old weights or on a KV cache that "
    "they filled (a prefix cache that is not cleared by an update)."
)
TRUNCATED = (
    "All are too high, so the sampler leaves tokens out by a top-p, top-k or min-p that was not requested; look for "
    f"defaults in its generation_config, and turn them off. {MODE}"
)
UNKNOWN = (
    "They are neither the raw ones nor the base model's; it runs other weights, has another tokenizer or a penalty. "
    f"{MODE}"
)


def reason(theirs: Logprobs, own: Logprobs, others: Mapping[str, Logprobs], allowed: float) -> str:
    """A sentence for log-probs that are off ``own``: the sentence of the first of ``others`` that they match."""
    for sentence, values in others.items():
        if apart(theirs, values) <= allowed:
            return sentence
    if bool((theirs >= own - allowed).all()):
        return TRUNCATED
    return UNKNOWN
