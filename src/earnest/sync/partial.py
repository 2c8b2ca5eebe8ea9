"""Unfinished rollouts when new weights arrive: they continue with the new weights, or are sampled again.

A completion is sampled in slices. Between two slices the sampler takes the newest weights, if there are newer ones, and
continues from the tokens so far. It computes their keys and values again, so all log-probs of a slice are those of one
version of the policy.
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
from earnest.sync.probe import Link, Target

Partial = Literal["finish", "continue", "restart"]
"""What happens to unfinished rollouts when new weights arrive: finish with the old ones, continue, or restart."""
SLICES = 4
"""The number of slices of a completion of the greatest length."""
RESTARTS = 2
"""How often a part is sampled again for newer weights; after that it is finished with the weights that it has."""


class Outdated(EarnestError):
    """Newer weights have arrived, so the part must be sampled again with them."""


class SlicedSampling:
    """Samples in slices with the sampler of ``link``. ``held`` are its weights; ``newest`` returns the newest ones."""

    def __init__(self, link: Link, held: Target, newest: Callable[[], Target], restart: bool) -> None:
        self.link, self.held, self.newest, self.restart = link, held, newest, restart

    def __call__(self, prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec) -> list[Rollout]:
        """``n`` completions of every prompt, in the order of the prompts. A stop string may span two slices, so with
        stop strings each completion is sampled in one piece."""
        if spec.stop:
            return self.link.sampler.sample(prompts, n, spec)
        width = -(-spec.max_new_tokens // SLICES)
        found = self.link.sampler.sample(prompts, n, replace(spec, max_new_tokens=width))
        for begin in range(width, spec.max_new_tokens, width):
            open_ = [i for i, rollout in enumerate(found) if rollout.finish == "length"]
            if not open_:
                break
            self._update()
            seed = derive(spec.seed, "slice", begin)  # a server gives equal seeds equal random numbers
            more = replace(spec, max_new_tokens=min(width, spec.max_new_tokens - begin), seed=seed)
            following = self.link.sampler.sample([(*found[i].prompt, *found[i].tokens) for i in open_], 1, more)
            for i, rollout in zip(open_, following, strict=True):
                found[i] = joined(found[i], rollout)
        return found

    def _update(self) -> None:
        target = self.newest()
        if target.weights.version > self.held.weights.version:
            if self.restart:
                raise Outdated(f"version {target.weights.version} has arrived.")
            self.link.sync(target)
            self.held = target


def joined(first: Rollout, second: Rollout) -> Rollout:
    """A rollout and its continuation as one rollout."""
    spans = list(first.spans)
    length, version = second.spans[0]
    if spans[-1][1] == version:
        spans[-1] = (spans[-1][0] + length, version)
    else:
        spans.append((length, version))
    return replace(
        first,
        tokens=first.tokens + second.tokens,
        logprobs=first.logprobs + second.logprobs,
        finish=second.finish,
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
