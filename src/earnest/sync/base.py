"""One protocol for samplers outside the training process: push the weights, probe them, sample.

    push(weights)      the sampler holds this version from now on
    score(rows)        its log-probs of fixed tokens, which the trainer compares with its own
    sample(prompts)    completions, each with the version that made it

A transport (Ray actors, HTTP servers, a bucket) implements ``Sampler``; ``earnest.sync.pool`` does the rest once.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from earnest.adapters import Adapter
from earnest.adapters.linalg import gathered
from earnest.adapters.whole import write_merged
from earnest.engines.local import LocalEngine
from earnest.errors import ConfigError, SamplingError
from earnest.models import Policy, SampleSpec
from earnest.rollouts.rollout import Rollout
from earnest.signals import Batch
from earnest.signals.scorer import LogProbsWanted, Who


class SamplerLost(SamplingError):
    """A sampler's process ended; ``restart`` may bring it back."""


@dataclass(frozen=True, eq=False)
class Weights:
    """One version of the trained weights. ``digest`` is of the version and of every byte: inside a guard's
    ``ablated()`` the weights differ under one version."""

    version: int
    digest: str
    state: Mapping[str, Tensor]
    policy: Policy
    adapter: Adapter
    _files: dict[bool, dict[str, bytes]] = field(default_factory=dict)

    @classmethod
    def of(cls, engine: LocalEngine) -> Weights:
        """The engine's weights as they are now, copied to the CPU. With several ranks each of them calls this."""
        state = {name: tensor.detach().cpu() for name, tensor in engine.adapter.state_dict().items()}
        whole = {name: gathered(tensor) for name, tensor in state.items()}
        return cls(engine.version, digest(engine.version, whole), state, engine.policy, engine.adapter)

    @property
    def whole(self) -> bool:
        """Whether the run trains weights of the model itself, so that a sampler needs all of them."""
        return self.adapter.replaces

    def files(self, plain: bool) -> dict[str, bytes]:
        """The adapter as files: a plain LoRA, which vLLM and SGLang read, or PEFT's and earnest's own. Where
        modules are trained whole, the plain files are those of the whole model.

        They are written once, from the live adapter: a trainer that samples and trains at the same time calls this
        before its next update. With several ranks each of them calls this, and rank 0's files are whole.
        """
        if self.whole and not plain:
            raise ConfigError(
                f"sampler.url: `earnest serve` takes adapters beside its weights, and this run trains whole modules "
                f"({self.adapter.variant.name}); sample with vLLM, on Ray (sampling.workers) or through a bucket."
            )
        if plain not in self._files:
            with tempfile.TemporaryDirectory(prefix="earnest-push-") as scratch:
                place = Path(scratch) / "adapter"
                if self.whole:
                    made = write_merged(self.adapter, place)
                else:
                    made = (self.adapter.export_lora if plain else self.adapter.save)(place, self.policy.name)
                self._files[plain] = {path.name: path.read_bytes() for path in sorted(made.iterdir())}
        return self._files[plain]


@contextmanager
def holding(engine: LocalEngine, weights: Weights) -> Iterator[None]:
    """Inside the block the engine's adapter has these weights; afterwards its own, bit for bit."""
    own = engine.adapter.state_dict()
    engine.adapter.load_state_dict(weights.state)
    try:
        yield
    finally:
        engine.adapter.load_state_dict(own)


class Sampler(Protocol):
    """One process that samples with the weights that were pushed last. ``place`` names it in messages. ``plain``: the
    format of the files that ``push`` reads (``Weights.files``); None: it reads the state. Every call may raise
    ``SamplerLost``; then it holds no weights."""

    place: str
    plain: bool | None

    def push(self, weights: Weights) -> None: ...

    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """log π(token_t | token_<t) for t ≥ 1 at temperature 1, row after row."""

    def sample(self, prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec) -> list[Rollout]:
        """``n`` completions of every prompt, prompt by prompt."""

    def restart(self) -> None:
        """Start the process again if the trainer can; else raise ``SamplingError``."""

    def close(self) -> None:
        """End the process, or remove what was pushed to it."""


@runtime_checkable
class Interruptible(Protocol):
    """A sampler whose completions under way can be ended, such as a server with a route for it (``interrupts``)."""

    @property
    def interrupts(self) -> bool: ...

    def sample_until(
        self,
        outdated: Callable[[], bool],
        prompts: Sequence[Sequence[int]],
        n: int,
        spec: SampleSpec,
        limits: Sequence[int],
    ) -> list[Rollout]:
        """``n`` completions of every prompt, of at most ``limits`` tokens each. Once ``outdated`` returns True they are
        ended; those that were not finished have the finish "length" and the tokens so far, which may be none."""


class SamplerEngine:
    """The engine in a sampler's process: it takes pushed weights, scores rows and samples."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine

    def push(self, version: int, state: Mapping[str, Tensor]) -> None:
        self.engine.adapter.load_state_dict(dict(state))
        self.engine.version = version

    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        return [float(x) for x in logprobs(self.engine, rows_batch(rows, self.engine.policy.pad_id))]

    def sample(self, prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec) -> list[Rollout]:
        return self.engine.sample(prompts, n, spec)


def rows_batch(rows: Sequence[Sequence[int]], pad: int) -> Batch:
    """Each row as a completion of its own first token."""
    return Batch.from_rows([list(r[:1]) for r in rows], [list(r[1:]) for r in rows], pad=pad)


def logprobs(engine: LocalEngine, batch: Batch, who: Who = "live", temperature: float = 1.0) -> Tensor:
    """The engine's log-probs of the batch's active tokens, float64 on the CPU."""
    found = engine.score(batch, LogProbsWanted(temperature), who)
    assert isinstance(found, Tensor)
    return found.detach().cpu().double()


def digest(version: int, state: Mapping[str, Tensor]) -> str:
    """sha256 of a version and its weights."""
    total = hashlib.sha256(str(version).encode())
    for name in sorted(state):
        total.update(name.encode())
        total.update(state[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
