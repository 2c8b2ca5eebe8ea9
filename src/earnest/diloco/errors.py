"""What can go wrong between replicas: errors for the user, and states from which a replica recovers by itself."""

from __future__ import annotations

from earnest.errors import EarnestError


class RoundStuck(EarnestError):
    """A round cannot be finished: too few replicas came, or a committed object is damaged and no later state exists."""


class Unreachable(EarnestError):
    """The Lighthouse that the settings name does not answer."""


class OutOfStep(Exception):
    """This replica's state is not the run's any more; it takes the run's state from the bucket and goes on."""


class FellBehind(OutOfStep):
    """The others are further, or the objects that would lead there step by step are gone."""


class DivergedState(OutOfStep):
    """The weights at the start of the round are not those that the others agreed on: nothing is averaged in."""
