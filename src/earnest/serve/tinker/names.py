"""Ids and names of training runs and checkpoints; only what matches a short pattern reaches the file system.

tinker://<training run>/weights/<name>            a state: weights and optimizer
tinker://<training run>/sampler_weights/<name>    weights to sample from
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import Literal

from earnest.serve.tinker.errors import WireError

Kind = Literal["weights", "sampler_weights"]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RUN = re.compile(r"[0-9a-f]{32}:train:[0-9]{1,9}")


def new_id() -> str:
    return uuid.uuid4().hex


def check_name(name: str) -> str:
    """A checkpoint's name, refused unless it is a plain word: no separator, no leading dot."""
    if not _NAME.fullmatch(name):
        raise WireError(
            f"the checkpoint name {name!r} must be 1 to 128 letters, digits, '.', '_' or '-', and begin with a letter "
            "or digit."
        )
    return name


def is_run(run: str) -> bool:
    return _RUN.fullmatch(run) is not None


def folder_of(run: str) -> str:
    """The folder name of a run. The id is checked again here, immediately before it is used as a path."""
    if not is_run(run):
        raise WireError(f"{run!r} is not an id of a training run.", 404)
    return run.replace(":", "-")


@dataclass(frozen=True)
class CheckpointPath:
    run: str
    kind: Kind
    name: str

    @classmethod
    def parse(cls, text: str) -> CheckpointPath:
        parts = text.removeprefix("tinker://").split("/")
        if not text.startswith("tinker://") or len(parts) != 3 or parts[1] not in ("weights", "sampler_weights"):
            raise WireError(
                f"{text!r} is not a path of a checkpoint; a path looks like tinker://<training run>/weights/<name> or "
                ".../sampler_weights/<name>."
            )
        folder_of(parts[0])
        return cls(parts[0], parts[1], check_name(parts[2]))  # type: ignore[arg-type]

    @property
    def checkpoint_id(self) -> str:
        return f"{self.kind}/{self.name}"

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.checkpoint_id}"
