"""Loggers besides metrics.jsonl: TensorBoard, trackio, Weights & Biases. Each is an extra of the package."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from earnest.errors import ConfigError, EarnestError, MissingExtra

SKIPPED = ("kind", "step", "version", "means", "seconds", "micro_batches")


def flatten(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line under slashed names: train/reward/mean, train/terms/grpo/loss, heldout/reward."""
    prefix = "heldout" if line["kind"] == "eval" else "train"
    return dict(_numbers({k: v for k, v in line.items() if k not in SKIPPED}, prefix))


def _numbers(data: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _numbers(value, f"{name}/{key}")
    elif isinstance(data, (int, float)) and not isinstance(data, bool):
        yield name, float(data)


def open_loggers(names: Sequence[str], run: Path, config: Mapping[str, Any], after_step: int) -> list[Logger]:
    """These loggers, for a run that continues after ``after_step``. A missing package raises, with its extra's name."""
    made: list[Logger] = []
    try:
        for name in names:
            made.append(_KINDS[name](run, config, after_step))
    except BaseException:
        for logger in made:
            logger.close()
        raise
    return made


def require_installed(names: Sequence[str]) -> None:
    """Raise if a logger's package is missing."""
    for name in names:
        _need(name)


def _need(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtra(package, package, f"loggers: [{package}]") from error


class TensorBoard:
    """Event files in RUN/tensorboard. A resumed run purges what was written after its checkpoint."""

    def __init__(self, run: Path, config: Mapping[str, Any], after_step: int) -> None:
        _need("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=after_step + 1 if after_step else None)

    def log(self, line: Mapping[str, Any]) -> None:
        for name, value in flatten(line).items():
            self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        self._writer.close()


class Trackio:
    """trackio, local by default; the project is "earnest", the run is the folder's name."""

    def __init__(self, run: Path, config: Mapping[str, Any], after_step: int) -> None:
        self._run = _need("trackio")
        self._run.init(project="earnest", name=run.name, config=dict(config), resume="allow" if after_step else "never")

    def log(self, line: Mapping[str, Any]) -> None:
        self._run.log(flatten(line), step=line["step"])

    def close(self) -> None:
        self._run.finish()


class Wandb(Trackio):
    """Weights & Biases; WANDB_MODE=offline keeps it on this machine. A run folder has one W&B run, and resumes it."""

    def __init__(self, run: Path, config: Mapping[str, Any], after_step: int) -> None:
        wandb = _need("wandb")
        identity = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]
        try:
            self._run = wandb.init(
                project="earnest", name=run.name, id=identity, dir=str(run), config=dict(config), resume="allow"
            )
        except Exception as error:  # wandb raises classes of its own for a missing login, a missing network, …
            if isinstance(error, EarnestError):
                raise
            raise ConfigError(
                f"loggers: wandb could not start ({str(error).splitlines()[0]}); log in with `wandb login`, "
                "or set WANDB_MODE=offline."
            ) from error


Logger = TensorBoard | Trackio
"""Receives the lines of metrics.jsonl."""
_KINDS: dict[str, Any] = {"tensorboard": TensorBoard, "trackio": Trackio, "wandb": Wandb}
