"""Mistakes of a Tinker client, with the HTTP status of an answer; a future has only the sentence."""

from __future__ import annotations

from earnest.errors import EarnestError

TOO_DEEP = "the request is nested too deeply to be read; send plain objects and lists of numbers."


class WireError(EarnestError):
    """A request that cannot be carried out; the client gets the message unchanged."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class NotThere(WireError):
    """No session, model, sampler, checkpoint or future of that name exists (any more)."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 404)
