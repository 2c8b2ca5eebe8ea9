"""``Segment`` and ``Trajectory``: a conversation as the exact tokens that the policy read and sampled.

A row is a list of segments; its tokens are theirs, one after the other. What the policy sampled is trained, with the
log-probs that it was sampled with; all other tokens have weight 0. A conversation has one row, and another one for each
turn at which the chat template rewrote its history.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from earnest.errors import SignalError
from earnest.tasks.environment import Ending, Message

Author = Literal["policy", "tool", "user", "template"]


@dataclass(frozen=True)
class Segment:
    """Tokens of one author. Log-probs and the version of the weights belong to what the policy sampled, and only to
    that."""

    tokens: tuple[int, ...]
    author: Author
    logprobs: tuple[float, ...] | None = None
    policy_version: int | None = None

    def __post_init__(self) -> None:
        sampled = self.author == "policy"
        if (self.logprobs is not None) != sampled or (self.policy_version is not None) != sampled:
            raise SignalError(
                f"a segment of the {self.author} has {'no' if sampled else 'its own'} log-probs or policy version; "
                "exactly the tokens that the policy sampled have both."
            )
        if self.logprobs is not None and len(self.logprobs) != len(self.tokens):
            raise SignalError(f"a segment has {len(self.logprobs)} log-probs for {len(self.tokens)} sampled tokens.")


Segments = tuple[Segment, ...]


@dataclass(frozen=True)
class Trajectory:
    """One conversation. The k-th segment of the policy, over all rows, is its k-th turn.

    ``histories`` has for each row the messages that its first tokens render; ``turn_rewards`` one reward per turn.
    """

    prompt_index: int
    sample_index: int
    rows: tuple[Segments, ...]
    histories: tuple[tuple[Message, ...], ...]
    messages: tuple[Message, ...]
    turn_rewards: tuple[float, ...]
    ending: Ending
    temperature: float

    def turns(self) -> Iterator[Segment]:
        """What the policy sampled, turn by turn."""
        return (segment for row in self.rows for segment in row if segment.author == "policy")

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens that the policy sampled."""
        return tuple(token for turn in self.turns() for token in turn.tokens)

    @property
    def logprobs(self) -> tuple[float, ...]:
        return tuple(value for turn in self.turns() for value in turn.logprobs or ())

    @property
    def finish(self) -> Literal["stop", "length"]:
        return "length" if self.ending == "token_limit" else "stop"

    @property
    def policy_version(self) -> int:
        """The oldest version that sampled a turn."""
        return min(turn.policy_version or 0 for turn in self.turns())

    def returns(self, discount: float, grade: float) -> tuple[float, ...]:
        """The return of each turn t of K: G_t = Σ_{k ≥ t} γ^(k-t) r_k + γ^(K-1-t) · grade."""
        found: list[float] = []
        following = grade
        for number, reward in enumerate(reversed(self.turn_rewards)):
            following = reward + (following if number == 0 else discount * following)
            found.append(following)
        return tuple(reversed(found))
