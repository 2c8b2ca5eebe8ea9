"""Advantages of conversations, and the check that a batch trains exactly what was sampled.

A unit of credit is a conversation, or one of its turns. Its return is compared with those of the other conversations of
the same prompt: with the same turn of them, if a unit is a turn.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import torch

from earnest.errors import SignalError
from earnest.rollouts.attempts import Attempt
from earnest.rollouts.conversing import TurnSettings
from earnest.rollouts.rollout import Rollout
from earnest.rollouts.trajectory import Trajectory
from earnest.signals import Batch, with_credit
from earnest.signals.advantages import Estimator


def with_turn_advantages(
    batch: Batch, attempts: Sequence[Attempt], estimator: Estimator, turns: TurnSettings
) -> tuple[Batch, int]:
    """(the batch with advantages, the number of turns that had no turn to be compared with). The rows of the
    conversations are the first rows of the batch, in their order."""
    returns: list[float] = []
    groups: list[tuple[int, int]] = []
    unit: list[int] = []
    for a in attempts:
        found = a.rollout
        assert isinstance(found, Trajectory)
        each = found.returns(turns.discount, a.grade.reward - sum(found.turn_rewards))
        for number, turn in enumerate(found.turns()):
            if turns.credit == "turn" or number == 0:
                returns.append(each[number])
                groups.append((found.prompt_index, number))
            unit += [len(returns) - 1] * len(turn.tokens)
    sizes = Counter(groups)
    compared = [k for k, group in enumerate(groups) if sizes[group] > 1 or turns.credit == "trajectory"]
    kept = {k: number for number, k in enumerate(compared)}
    if not kept:
        raise SignalError("no turn of these conversations can be compared with another; sample more per prompt.")
    names = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    rest = batch.active.shape[0] - len(unit)
    device = batch.device
    made = with_credit(
        batch,
        torch.tensor([returns[k] for k in kept], dtype=torch.float64, device=device),
        torch.tensor([names[groups[k]] for k in kept], device=device),
        torch.tensor([kept.get(k, -1) for k in unit] + [-1] * rest, device=device),
        estimator,
    )
    return made, len(groups) - len(kept)


def check_exact(batch: Batch, attempts: Sequence[Attempt], drawn: Mapping[tuple[int, int], Sequence[Rollout]]) -> None:
    """Raise unless the tokens that the batch trains, with their log-probs, are those that the sampler returned.
    ``drawn`` is the sampler's own record, which nothing between it and the batch has touched. So a turn that was
    tokenized again, a shifted mask and an observation that is trained are all found."""
    tokens: dict[tuple[int, int], list[int]] = defaultdict(list)
    values: dict[tuple[int, int], list[float]] = defaultdict(list)
    versions: dict[tuple[int, int], set[int]] = defaultdict(set)
    row = 0
    starts = [0, *torch.tensor(batch.sizes).cumsum(0).tolist()]
    target = batch.token_target.tolist()
    behaviour = [] if batch.behaviour is None else batch.behaviour.tolist()
    version = batch.policy_version.tolist()
    for a in attempts:
        key = (a.rollout.prompt_index, a.rollout.sample_index)
        for _ in a.rollout.rows:
            tokens[key] += target[starts[row] : starts[row + 1]]
            values[key] += behaviour[starts[row] : starts[row + 1]]
            versions[key].add(version[row])
            row += 1
    for key, found in tokens.items():
        own = drawn.get(key, ())
        if found != [token for rollout in own for token in rollout.tokens]:
            raise SignalError(
                f"sample {key[1]} of prompt {key[0]}: the batch trains other tokens than the policy sampled: a turn "
                "was tokenized again, the mask is shifted, or an observation is trained."
            )
        if not torch.equal(torch.tensor(values[key]), torch.tensor([v for rollout in own for v in rollout.logprobs])):
            raise SignalError(
                f"sample {key[1]} of prompt {key[0]}: the batch has other log-probs than those that the tokens were "
                "sampled with."
            )
        if not versions[key] <= {rollout.policy_version for rollout in own}:
            raise SignalError(
                f"sample {key[1]} of prompt {key[0]}: the batch names the policy version {min(versions[key])}, which "
                "did not sample it."
            )
