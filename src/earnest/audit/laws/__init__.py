"""The laws of a training step, one file each."""

from earnest.audit.law import Law
from earnest.audit.laws import (
    at_reference,
    averages,
    clipping,
    coverage,
    critic,
    direction,
    documents,
    finite_difference,
    identical,
    inputs,
    knobs,
    liveness,
    masks,
    metrics,
    on_policy,
    pair_metrics,
    pairs,
    paths,
    ratio,
    rewards,
    shadow,
    shift,
    splits,
)

LAWS: tuple[Law, ...] = tuple(
    module.LAW
    for module in (
        liveness,
        inputs,
        knobs,
        on_policy,
        ratio,
        clipping,
        rewards,
        critic,
        at_reference,
        identical,
        pairs,
        splits,
        masks,
        documents,
        coverage,
        shift,
        paths,
        metrics,
        averages,
        pair_metrics,
        finite_difference,
        direction,
        shadow,
    )
)
