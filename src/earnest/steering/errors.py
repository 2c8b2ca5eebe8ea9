"""Errors of steering."""

from earnest.errors import EarnestError


class SteeringError(EarnestError):
    """A vector cannot be made, applied or calibrated with these settings."""


class SteeringWarning(UserWarning):
    """The loop continues, but its training samples are doubtful."""


class TooFewSurvivors(SteeringError):
    """Too few steered samples survived the filter at every dose that was tried."""


class Collapsed(SteeringError):
    """The policy fell below the coherence floor."""
