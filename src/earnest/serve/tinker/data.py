"""Requests and results as they are after decoding and before encoding.

Shapes: N positions of one datum, K targets per position, P tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Datum:
    """Input tokens, and the loss's inputs by name; position i of the input predicts ``target_tokens[i]``."""

    tokens: tuple[int, ...]
    inputs: Mapping[str, Tensor]

    @property
    def targets(self) -> Int[Tensor, "N ..."]:
        return self.inputs["target_tokens"]


@dataclass(frozen=True, eq=False)
class PassRequest:
    """A forward pass, with its backward unless ``forward_only``."""

    model_id: str
    seq_id: int | None
    data: tuple[Datum, ...]
    loss_fn: str
    config: Mapping[str, float | str]
    forward_only: bool = False


@dataclass(frozen=True, eq=False)
class PassOutput:
    """The log-probs of every datum's targets, and metrics named as the SDK reduces them ("loss:sum")."""

    logprobs: tuple[Float[Tensor, "_ ..."], ...]
    metrics: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Top:
    """The K most probable tokens at each position; ``scored`` is False for the rows that have no values."""

    ids: Int[Tensor, "P K"]
    logprobs: Float[Tensor, "P K"]
    scored: tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class Sequence:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length"]
    top: Top | None = None


@dataclass(frozen=True, eq=False)
class Cells:
    """A matrix of numbers, dense or as compressed sparse rows; ``values`` are flat."""

    values: Tensor
    shape: tuple[int, ...]
    rows: Int[Tensor, " R"] | None = None
    columns: Int[Tensor, " C"] | None = None


@dataclass(frozen=True, eq=False)
class SampleOutput:
    """``prompt`` has None for a token that was not scored: the first never is, since it has no context. Other scores
    of the prompt are None where not requested; row i is about prompt token i + 1."""

    sequences: tuple[Sequence, ...]
    prompt: tuple[float | None, ...] | None = None
    top_prompt: Top | None = None
    targets: Cells | None = None
    alternatives: tuple[Int[Tensor, "P K"], Float[Tensor, "P K"]] | None = None


@dataclass(frozen=True)
class JsonResult:
    body: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """A request that failed, and whether the client or the server is the cause."""

    error: str
    category: Literal["user", "server"]


Result = PassOutput | SampleOutput | JsonResult | Failed
