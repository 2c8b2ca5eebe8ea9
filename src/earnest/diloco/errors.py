"""What can go wrong between replicas: errors for the user, and states from which a replica recovers by itself."""

from earnest.errors import EarnestError


class RoundStuck(EarnestError):
    """A round cannot be finished: too few replicas sent a difference, or a committed object is damaged and no later
    state exists."""


class Unreachable(EarnestError):
    """The Lighthouse that the settings name does not answer."""


class OutOfStep(Exception):
    """This replica's state is no longer the run's; it takes the run's state from the bucket and continues."""


class FellBehind(OutOfStep):
    """The others have finished later rounds, or objects that this replica needs to follow them were removed."""


class DivergedState(OutOfStep):
    """The weights at the start of the round are not those that the others agreed on; nothing of this replica is
    averaged."""
