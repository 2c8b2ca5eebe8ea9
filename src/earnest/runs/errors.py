"""How a run can end before its last step."""

from __future__ import annotations

from pathlib import Path

from earnest.errors import EarnestError


class RunStopped(EarnestError):
    """Training cannot go on (a loss that is not finite, a grader that raises, a broken law); the folder is whole."""

    exit_code = 1


class Interrupted(Exception):
    """Somebody asked the run to stop; its folder can be resumed."""

    def __init__(self, folder: Path, step: int, steps: int, signal: int) -> None:
        super().__init__(f"stopped after step {step} of {steps}; continue with: earnest run {folder} --resume")
        self.folder, self.step, self.signal = folder, step, signal

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as a shell reports it: 130 for Ctrl-C."""
        return 128 + self.signal
