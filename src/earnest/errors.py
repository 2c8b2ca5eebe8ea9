"""Errors for the user: each is a ``ValueError`` whose sentence has the value, what is allowed, and the way out."""

from __future__ import annotations

from collections.abc import Mapping

from earnest_audit.errors import EarnestError as EarnestError
from earnest_audit.errors import nearest as nearest


class SignalError(EarnestError):
    """A batch or a signal in it is malformed, or a term misses one that it needs."""


class ObjectiveError(EarnestError):
    """An objective cannot be computed with these settings."""


class NothingToTrain(ObjectiveError):
    """Every live term is idle on this batch; ``idle`` has each one's reason."""

    def __init__(self, idle: Mapping[str, str]) -> None:
        self.idle = dict(idle)
        reasons = "; ".join(f"{label}: {why}" for label, why in idle.items())
        super().__init__(
            f"no term has a token in this batch ({reasons}): nothing would be trained. Leave this batch out."
        )


class ConfigError(EarnestError):
    """A setting is unknown, of the wrong type or out of range."""


class CheckpointError(EarnestError):
    """A checkpoint or run folder is missing, damaged, or belongs to something else."""


class UnknownModel(EarnestError):
    """There is no model of that name or in that folder, or it cannot be downloaded."""


class UnusableModel(EarnestError):
    """The model cannot be a policy: not a causal LM, pickled weights, missing tensors, an unsupported head."""


class SamplingError(EarnestError):
    """A sampling request is out of range, or the model's logits are not finite."""


class MissingExtra(EarnestError):
    """An optional dependency is not installed; the message has the install line."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f'{purpose} needs the package {package}: pip install "earnest[{extra}]"')
