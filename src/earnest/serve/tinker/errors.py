"""What a Tinker client did wrong, with the HTTP status or the future that it goes back in."""

from __future__ import annotations

from earnest.errors import EarnestError


class WireError(EarnestError):
    """A request that cannot be carried out; the sentence goes back to the client as it is."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class NotThere(WireError):
    """A session, model, sampler, checkpoint or future of that name does not exist (any more)."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 404)
