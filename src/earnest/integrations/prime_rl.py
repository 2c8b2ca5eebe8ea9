"""A custom loss for PRIME-RL: earnest's terms on the log-probs that its trainer passes.

    [trainer.loss]
    type = "custom"
    import_path = "earnest.integrations.prime_rl.loss"
    kwargs = {clip = 0.2, clip_high = 0.28}

PRIME-RL calls the function on one sequence at a time and divides the summed result by the global number of tokens,

    L = Σ_i Σ_t w_t·ℓ_t / N_tokens,

which is the token mean of DAPO. Terms that divide by anything else (GRPO by each sequence's length) would be another
objective under their name, and terms that read more than one log-prob per token cannot be computed at all.
``configure`` refuses both; ``python -m earnest.integrations.prime_rl rl.toml`` calls it before a GPU is rented.
"""

from __future__ import annotations

import functools
import json
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from earnest.errors import ConfigError, EarnestError, SignalError
from earnest.objectives import Objective, Term
from earnest.objectives.needs import LogProb
from earnest.objectives.registry import build, build_objective
from earnest.objectives.view import Field, Scalars, View
from earnest.signals.batch import SUMMED, Batch, Counts, Reference

PATH = "earnest.integrations.prime_rl.loss"
SIGNALS = frozenset({"advantages", "behaviour", "reference.logprobs"})


class LossInputs(Protocol):
    """What PRIME-RL passes: one sequence, every field [seq]; position t holds the log-prob *of* token t."""

    trainer_logprobs: Float[Tensor, " seq"]
    inference_logprobs: Float[Tensor, " seq"]
    ref_logprobs: Float[Tensor, " seq"] | None
    advantages: Float[Tensor, " seq"]
    loss_mask: Bool[Tensor, " seq"]
    loss_weights: Float[Tensor, " seq"] | None


@dataclass
class LossOutputs:
    """What PRIME-RL reads from the result: the sum over the sequence's tokens, and scalars for its logs."""

    loss: Float[Tensor, ""]
    metrics: dict[str, Tensor]


def loss(inputs: Any, **kwargs: Any) -> LossOutputs:
    """The function that ``import_path`` names; ``kwargs`` are those of ``configure``, which is called once for each."""
    return _configured(json.dumps(kwargs, sort_keys=True))(inputs)


@functools.cache
def _configured(kwargs: str) -> Callable[[LossInputs], LossOutputs]:
    return configure(**json.loads(kwargs))


def configure(
    objective: Sequence[Mapping[str, Any]] | None = None, **fields: Any
) -> Callable[[LossInputs], LossOutputs]:
    """The loss of these settings, or the reason why PRIME-RL cannot compute it. Either ``objective`` (terms as in a
    recipe: kind, weight, fields) or the fields of one ``dapo`` term."""
    if objective is not None and fields:
        raise ConfigError(
            f"{', '.join(sorted(fields))}: with `objective` every field belongs into its term; move it there."
        )
    made = build_objective(objective) if objective is not None else Objective.of(build("dapo", **fields))
    live = [w.term for w in made.live()]
    if not live:
        raise ConfigError("objective: every term has weight 0, so nothing would be trained; give one a weight.")
    for term in live:
        refuse_unless_per_token(term)
    return functools.partial(evaluate, made)


def evaluate(objective: Objective, inputs: LossInputs) -> LossOutputs:
    """Σ over the masked tokens, on the graph of ``trainer_logprobs``."""
    batch, scalars = to_batch(inputs)
    if batch is None:  # a sequence without active tokens: 0 on the graph, so that backward runs
        return LossOutputs(inputs.trainer_logprobs[:0].sum(), {})
    objective.check(batch)
    counts = {w.term.label: SUMMED for w in objective.live()}
    found = objective.evaluate(batch, scalars, objective.initial_state(), counts)
    metrics = {
        f"earnest/{label}/{name}": torch.tensor(metric.value, device=found.loss.device)
        for label, value in found.values.items()
        for name, metric in value.metrics.items()
    }
    return LossOutputs(found.loss, metrics)


def to_batch(inputs: LossInputs) -> tuple[Batch | None, Scalars]:
    """The sequence as a batch of one row whose active tokens are the masked ones. Token ids are unknown here."""
    lp, mask, given = inputs.trainer_logprobs, inputs.loss_mask, inputs.loss_weights
    for name in ("inference_logprobs", "ref_logprobs", "advantages", "loss_mask", "loss_weights"):
        value = getattr(inputs, name)
        if value is not None and value.shape != lp.shape:
            raise SignalError(
                f"{name} has shape {tuple(value.shape)}, trainer_logprobs {tuple(lp.shape)}; give one per token."
            )
    weight = mask.float() if given is None else torch.where(mask, given.float(), 0.0)
    on = weight != 0
    if not bool(on.any()):
        return None, {}
    reference = None if inputs.ref_logprobs is None else Reference(logprobs=inputs.ref_logprobs.detach()[on])
    nothing = torch.zeros(1, lp.shape[0], dtype=torch.long, device=lp.device)
    one = torch.zeros(1, dtype=torch.long, device=lp.device)
    batch = Batch(
        inputs=nothing,
        targets=nothing,
        weight=weight[None],
        length=one + lp.shape[0],
        role=("rollout",),
        group=one,
        pair=one - 1,
        policy_version=one,
        advantages=inputs.advantages.detach()[on],
        behaviour=inputs.inference_logprobs.detach()[on],
        reference=reference,
    )
    return batch, {LogProb(): Field(lp[on], ran="PRIME-RL's trainer")}


def refuse_unless_per_token(term: Term) -> None:
    """Raise where ``term`` reads more than PRIME-RL passes, or divides by anything but the number of tokens."""
    batch, scalars = _probe()
    if "rollout" not in term.roles:
        raise ConfigError(
            f"{term.label}: reads {' and '.join(term.roles)} rows, and PRIME-RL's custom loss gets one rollout at a "
            "time; train it with `earnest run`."
        )
    beyond = sorted(set(term.signals()) - SIGNALS)
    needs = [need for need in term.needs(batch, term.initial_state()) if not isinstance(need, LogProb)]
    whole = [s for s in beyond if s in ("teacher", "reference.distribution")]
    if whole or needs:
        what = ", ".join([*whole, *(type(need).__name__ for need in needs)])
        raise ConfigError(
            f"{term.label}: needs {what}, which is made from logits (a top-K or full distribution) or weights; "
            "PRIME-RL's custom loss gets one log-prob per token. Take a term on log-probs (dapo, cispo, reinforce, "
            "reference_kl with per='token'), or train it with `earnest run`."
        )
    if beyond:
        raise ConfigError(
            f"{term.label}: needs {', '.join(beyond)}, which PRIME-RL does not pass; leave out the field that needs it."
        )
    if not _is_token_mean(term, batch, scalars):
        raise ConfigError(
            f"{term.label}: divides by something else than the number of tokens, and PRIME-RL divides by that, so it "
            "would be another objective under this name. Take dapo (the clipped ratio), cispo, or per='token'."
        )


def _is_token_mean(term: Term, batch: Batch, scalars: Scalars) -> bool:
    """True where the loss is Σ_t f_t / tokens: scaled by that count, blind to the others, and a sum over rows."""

    def value(part: Batch, tokens: Tensor, counts: Counts) -> float:
        fields = {need: Field(field.values[tokens]) for need, field in scalars.items()}
        seen = View.of(part, fields, term.tokens(part), counts, term.initial_state(), term.label)
        return float(term.evaluate(seen).loss.detach())

    everything = torch.ones(batch.active.shape[0], dtype=torch.bool)
    whole = value(batch, everything, SUMMED)
    parts = [value(batch.rows([r]), batch.row == r, SUMMED) for r in range(len(batch))]
    same = [value(batch, everything, Counts(tokens=1.0, sequences=s, max_length=m)) for s, m in ((2, 1), (1, 9))]
    halved = value(batch, everything, Counts(tokens=2.0, sequences=1, max_length=1))
    close = [abs(x - whole) <= 1e-6 * (1 + abs(whole)) for x in (sum(parts), *same, 2 * halved)]
    return term.additive and all(close)


@functools.cache
def _probe() -> tuple[Batch, Scalars]:
    """Two rows of unequal length, with all inputs that PRIME-RL can pass; off-policy, so that no term cancels."""
    behaviour = [[-1.0, -0.5, -2.0, -0.1], [-0.7, -1.3]]
    batch = Batch.from_rows(
        [[0], [0]],
        [[1, 2, 3, 4], [5, 6]],
        advantages=[[1.0, 1.0, 1.0, 1.0], [-0.5, -0.5]],
        behaviour=behaviour,
        correct=[True, False],
        max_length=4,
    )
    flat = torch.tensor([x for row in behaviour for x in row])
    batch = batch.with_signals(reference=Reference(logprobs=flat - 0.3))
    return batch, {LogProb(): Field(flat + torch.tensor([-0.3, 0.1, 0.2, -0.05, 0.4, -0.2]))}


def check_file(path: Path) -> str:
    """Read PRIME-RL's TOML and try its loss; what it will train, in a line."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); give PRIME-RL's TOML file.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from None
    settings = data.get("trainer", data).get("loss", {})
    if settings.get("type") != "custom" or settings.get("import_path") != PATH:
        raise ConfigError(
            f"{path}: [trainer.loss] has type {settings.get('type')!r} and import_path "
            f"{settings.get('import_path')!r}; earnest's loss is type = 'custom', import_path = {PATH!r}."
        )
    made = configure(**settings.get("kwargs", {}))
    objective: Objective = made.args[0]  # type: ignore[attr-defined]
    terms = " + ".join(f"{w.weight:g} × {w.term!r}" for w in objective.live())
    skipped = f"; skipped (weight 0): {', '.join(objective.skipped)}" if objective.skipped else ""
    return f"{terms}, summed over tokens{skipped}"


def main(arguments: Sequence[str]) -> int:
    """Exit code 0 where the file's loss can be computed, 2 with the reason where not."""
    if len(arguments) != 1:
        print("usage: python -m earnest.integrations.prime_rl CONFIG.toml", file=sys.stderr)
        return 2
    try:
        print(check_file(Path(arguments[0])))
    except EarnestError as error:
        print(f"earnest: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
