"""The laws of a training step, one file each."""

from earnest.audit.law import Law
from earnest.audit.laws import (
    at_reference,
    averages,
    clipping,
    coverage,
    direction,
    finite_difference,
    identical,
    inputs,
    knobs,
    liveness,
    masks,
    metrics,
    on_policy,
    pair_metrics,
    paths,
    shadow,
    splits,
)

LAWS: tuple[Law, ...] = tuple(
    module.LAW
    for module in (
        liveness,
        inputs,
        knobs,
        on_policy,
        clipping,
        at_reference,
        identical,
        splits,
        masks,
        coverage,
        paths,
        metrics,
        averages,
        pair_metrics,
        finite_difference,
        direction,
        shadow,
    )
)
