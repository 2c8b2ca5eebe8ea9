"""Unfinished rollouts when new weights arrive: they continue with the new weights, or are sampled again.

A completion is sampled in slices. Between two slices the sampler takes the newest weights, if there are newer ones, and
continues from the tokens so far. It computes their keys and values again, so all log-probs of a slice are those of one
version of the policy. A slice ends when new weights arrive, where the sampler can be interrupted (``Interruptible``);
else it has a fixed length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from earnest.errors import EarnestError
from earnest.models import SampleSpec
from earnest.rollouts.rollout import Rollout
from earnest.rollouts.trajectory import Trajectory
from earnest.seeds import derive
from earnest.sync.base import Interruptible
from earnest.sync.probe import Link, Target

Partial = Literal["finish", "continue", "restart"]
"""What happens to unfinished rollouts when new weights arrive: finish with the old ones, continue, or restart."""
SLICES = 4
"""The number of slices of a completion of the greatest length, where the sampler cannot be interrupted."""
RESTARTS = 2
"""How often a part is sampled again for newer weights; after that it is finished with the weights that it has."""


class Outdated(EarnestError):
    """Newer weights have arrived, so the part must be sampled again with them."""


class PartialSampling:
    """Samples with the sampler of ``link``. ``held`` are its weights; ``newest`` returns the newest ones."""

    def __init__(self, link: Link, held: Target, newest: Callable[[], Target], restart: bool) -> None:
        self.link, self.held, self.newest, self.restart = link, held, newest, restart

    def __call__(self, prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec) -> list[Rollout]:
        """``n`` completions of every prompt, in the order of the prompts. A stop string may span two slices, so with
        stop strings each completion is sampled in one piece."""
        if spec.stop:
            return self.link.sampler.sample(prompts, n, spec)
        longest, number = spec.max_new_tokens, 0
        found = self._slice(prompts, n, spec, [longest] * len(prompts))
        while open_ := [i for i, r in enumerate(found) if r.finish == "length" and len(r.tokens) < longest]:
            self._update()
            number += 1
            more = replace(spec, seed=derive(spec.seed, "slice", number))  # a server repeats the numbers of a seed
            left = [longest - len(found[i].tokens) for i in open_]
            following = self._slice([(*found[i].prompt, *found[i].tokens) for i in open_], 1, more, left)
            for i, rollout in zip(open_, following, strict=True):
                found[i] = joined(found[i], rollout)
        return found

    def _slice(
        self, prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec, limits: Sequence[int]
    ) -> list[Rollout]:
        """The next tokens of every prompt: up to the arrival of new weights, where the sampler can be interrupted."""
        sampler = self.link.sampler
        if isinstance(sampler, Interruptible) and sampler.interrupts:
            return sampler.sample_until(self._outdated, prompts, n, spec, limits)
        width = -(-spec.max_new_tokens // SLICES)
        return sampler.sample(prompts, n, replace(spec, max_new_tokens=min(width, *limits)))  # all limits are equal

    def _outdated(self) -> bool:
        return self.newest().weights.version > self.held.weights.version

    def _update(self) -> None:
        if self._outdated():
            target = self.newest()
            if self.restart:
                raise Outdated(f"version {target.weights.version} has arrived.")
            self.link.sync(target)
            self.held = target


def joined(first: Rollout, second: Rollout) -> Rollout:
    """A rollout and its continuation as one rollout. Either may have no tokens."""
    spans: list[tuple[int, int]] = []
    for length, version in (*first.spans, *second.spans):
        if spans and spans[-1][1] == version:
            spans[-1] = (spans[-1][0] + length, version)
        elif length:
            spans.append((length, version))
    return replace(
        first,
        tokens=first.tokens + second.tokens,
        logprobs=first.logprobs + second.logprobs,
        finish=second.finish,
        policy_version=spans[0][1] if spans else second.policy_version,
        continued=tuple(spans) if len(spans) > 1 else (),
    )


def pieces(rollout: Rollout | Trajectory) -> list[Rollout]:
    """Split a rollout or a conversation by version and turn: each piece is a rollout, and the tokens before it are its
    prompt."""
    found: list[Rollout] = []
    for row in rollout.rows:
        read: tuple[int, ...] = ()
        for segment in row:
            if segment.logprobs is not None and segment.policy_version is not None:
                place = (rollout.prompt_index, rollout.sample_index, read, segment.tokens, segment.logprobs)
                found.append(Rollout(*place, "length", segment.policy_version, rollout.temperature))
            read += segment.tokens
    return found
