"""What stops a replay."""

from earnest.errors import EarnestError


class ReplayError(EarnestError):
    """Traces, answers or pairs are not usable; the job stops, and the answers so far stay on disk."""


class TraceError(ReplayError):
    """A line of a trace file is malformed; the message has the file, the line and what is wrong with it."""


class EndpointError(ReplayError):
    """An OpenAI-compatible endpoint did not answer, or refused."""


class CleaningError(ReplayError):
    """A filter raised, or left nothing."""
