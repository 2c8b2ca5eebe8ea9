"""The SDK, and a batch as it sends one: one datum per row, C targets per position.

Shapes: N active tokens, C columns; R rows of length T.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from earnest.engines.optimizers import AdamW
from earnest.errors import ConfigError, MissingExtra
from earnest.models.sampling import SampleSpec
from earnest.signals.batch import Batch


def connect(base_url: str | None, api_key: str | None) -> Any:
    """A ``tinker.ServiceClient``; without arguments it reads TINKER_BASE_URL and TINKER_API_KEY."""
    try:
        import tinker
    except ImportError:
        raise MissingExtra("tinker", "tinker", "TinkerEngine") from None
    try:
        return tinker.ServiceClient(base_url=base_url, api_key=api_key)
    except tinker.TinkerError as error:
        raise ConfigError(
            f"no Tinker service at {base_url or 'TINKER_BASE_URL'}: {error} Start `earnest serve`, or set a key."
        ) from error


@dataclass(frozen=True)
class Stepped:
    """What a service reports of a step; nan where it reports nothing."""

    norm: float
    factor: float
    moved: float


def optim_step(training: Any, spec: AdamW, lr: float, max_grad_norm: float | None) -> Stepped:
    from tinker import types

    params = types.AdamParams(
        learning_rate=lr,
        beta1=spec.betas[0],
        beta2=spec.betas[1],
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        grad_clip_norm=max_grad_norm or 0.0,
    )
    reported = training.optim_step(params).result().metrics or {}
    names = ("unclipped_grad_l2:mean", "clip_factor:mean", "update_l2:mean")
    return Stepped(*(float(reported.get(name, math.nan)) for name in names))


def sample(sampler: Any, prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec) -> list[list[Any]]:
    """``n`` sequences for each prompt. Equal prompts share one request, so that a seed does not repeat itself."""
    from tinker import types

    params = types.SamplingParams(
        max_tokens=spec.max_new_tokens,
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k or -1,
        seed=spec.seed,
        stop=_stop(spec),
    )
    keys = [tuple(p) for p in prompts]
    times = Counter(keys)
    asked = {key: sampler.sample(types.ModelInput.from_ints(list(key)), n * k, params) for key, k in times.items()}
    drawn = {key: list(future.result().sequences) for key, future in asked.items()}
    found = []
    for key in keys:
        own, drawn[key] = drawn[key][:n], drawn[key][n:]
        found.append(own)
    return found


def _stop(spec: SampleSpec) -> list[str] | list[int] | None:
    if spec.stop and spec.stop_ids:
        raise ConfigError("a Tinker service takes texts or ids that end a completion, not both; give one kind.")
    if spec.stop:
        return list(spec.stop)
    return None if spec.stop_ids is None else list(spec.stop_ids)


def _data(batch: Batch, targets: Int[Tensor, "N C"], weights: Float[Tensor, "N C"] | None) -> list[Any]:
    """One datum per row; positions that are not active have target 0 and weight 0."""
    from tinker import types

    C = targets.shape[1]
    found = []
    for row in range(len(batch)):
        mine = batch.row == row
        n, at = int(batch.length[row]), batch.position[mine]
        ids = torch.zeros(n, C, dtype=torch.long)
        values = torch.zeros(n, C)
        ids[at] = targets[mine]
        if weights is not None:
            values[at] = weights[mine].float()
        if C == 1:
            ids, values = ids[:, 0], values[:, 0]
        found.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(batch.inputs[row, :n].tolist()),
                loss_fn_inputs={"target_tokens": ids, "weights": values},
            )
        )
    return found


def _flat(batch: Batch, rows: Sequence[Tensor], C: int) -> Float[Tensor, "N C"]:
    """The active tokens' log-probs from those of all positions, row by row."""
    parts = [lp.reshape(-1, C)[batch.position[batch.row == row]] for row, lp in enumerate(rows)]
    return torch.cat(parts)


def forward(training: Any, batch: Batch, targets: Int[Tensor, "N C"]) -> Float[Tensor, "N C"]:
    out = training.forward(_data(batch, targets, None), "cross_entropy").result()
    rows = [found["logprobs"].to_torch() for found in out.loss_fn_outputs]
    return _flat(batch, rows, targets.shape[1]).detach()


def backward(training: Any, batch: Batch, targets: Int[Tensor, "N C"], slope: Float[Tensor, "N C"]) -> None:
    """Gradients of Σ slope·lp: cross_entropy is -Σ w·lp, so w = -slope."""
    training.forward_backward(_data(batch, targets, -slope), "cross_entropy").result()


def custom(
    training: Any, batch: Batch, targets: Int[Tensor, "N C"], loss: Callable[[Float[Tensor, "N C"]], Tensor]
) -> None:
    """``forward_backward_custom`` with a loss on the active tokens' log-probs."""

    def on_rows(_: Any, rows: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        return loss(_flat(batch, rows, targets.shape[1])), {}

    training.forward_backward_custom(_data(batch, targets, None), on_rows).result()
