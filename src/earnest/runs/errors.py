"""How a run can end before its last step."""

from __future__ import annotations

from earnest.errors import EarnestError


class RunStopped(EarnestError):
    """Training cannot continue: a loss is not finite, a grader raises, or a law fails. The run folder is complete."""

    exit_code = 1


class Interrupted(Exception):
    """A signal stopped the run; ``again`` is the command that continues it."""

    def __init__(self, again: str, step: int, steps: int, signal: int) -> None:
        super().__init__(f"stopped after step {step} of {steps}; continue with: {again}")
        self.again, self.step, self.signal = again, step, signal

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as a shell reports it: 130 for Ctrl-C."""
        return 128 + self.signal
