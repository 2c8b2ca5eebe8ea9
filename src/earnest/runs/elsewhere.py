"""Sampling on a server elsewhere: ``sampler=http://…`` in a recipe.

Before a request whose weights the server does not have yet, they are pushed to it under a name of their own (servers
keep caches by name), and it is asked what it thinks of a fixed text, the probe:

    off   = mean_t |lp_server(t) - lp_trainer(t)|  ≤ tolerance
    stale : it is nearer to the weights that it had before than to these,  where the two can be told apart

The first completions of every version are then scored here as well, at the sampling temperature: log-probs that mean
something else (before temperature, with a penalty) are found before they are a behaviour policy.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.config import RunConfig
from earnest.engines.base import LogProbsWanted, Rollout
from earnest.errors import SamplingError
from earnest.models import SampleSpec
from earnest.runs.endpoint import MOST, Endpoint, Sampled
from earnest.runs.samplers import COARSE, TOLERANCE, probe_batch, probe_texts, weights_digest
from earnest.seeds import derive
from earnest.signals import Batch

if TYPE_CHECKING:
    from earnest.runs.setup import Setup

AT_ONCE = 8
"""Requests under way together."""
APART = 4.0
"""Weights can be told apart where the probe moved by this multiple of the rounding seen so far."""


class ServerSampler:
    """The trainer's side. ``metrics``: how far off the probe was, how far the weights had moved on it, the version."""

    def __init__(self, config: RunConfig, say: Callable[[str], None]) -> None:
        assert config.sampler is not None
        say(f"looking for the sampler at {config.sampler.url}")
        self.endpoint = Endpoint(config.sampler)
        self.metrics: dict[str, float] = {}
        self._run = secrets.token_hex(4)
        self._scratch = tempfile.TemporaryDirectory(prefix="earnest-push-")
        self._holds: str | None = None  # the digest of the weights that the server has
        self._name = ""
        self._seen: Float[Tensor, " N"] | None = None  # the trainer's probe under weights that the server surely had
        self._noise = 1e-6

    def sample(self, setup: Setup, prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec) -> list[Rollout]:
        """What ``engine.sample`` gives, prompt by prompt. A request has one prompt and a seed of its own: under one
        seed a server would answer equal prompts equally."""
        if spec.stop:
            raise SamplingError("sampler: stop strings end completions inside a token elsewhere; leave them out.")
        fresh = self._sync(setup)
        ends = spec.ends(setup.policy)
        parts = [(i, s, min(MOST, n - s)) for i in range(len(prompts)) for s in range(0, n, MOST)]

        def one(part: tuple[int, int, int]) -> list[Sampled]:
            i, start, count = part
            own = replace(spec, seed=derive(spec.seed, f"sampler {i}", start))
            return self.endpoint.sample(self._name, prompts[i], count, own, ends)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(one, parts))
        found = [
            Rollout(
                i,
                start + k,
                tuple(prompts[i]),
                s.tokens,
                s.logprobs,
                s.finish,
                setup.engine.version,
                spec.temperature or 1.0,
            )
            for (i, start, _), own in zip(parts, answers, strict=True)
            for k, s in enumerate(own)
        ]
        if fresh and spec.top_p == 1.0 and spec.top_k == 0:
            self._check_behaviour(setup, found[:MOST])
        return found

    def close(self) -> None:
        """Take our adapter off the server, as far as it still listens."""
        if self._name:
            with suppress(SamplingError):
                self.endpoint.unload(self._name)
            self._name = ""
        self._scratch.cleanup()

    # --- weights ------------------------------------------------------------------------------------------------------

    def _sync(self, setup: Setup) -> bool:
        """Push the trainer's weights where the server has others, and find out whether it uses them."""
        version = setup.engine.version
        state = {name: tensor.cpu() for name, tensor in setup.adapter.state_dict().items()}
        digest = weights_digest(version, state)
        if digest == self._holds:
            return False
        name, old = f"earnest-{self._run}-v{version}-{digest[:8]}", self._name
        self.endpoint.load(name, setup.adapter, setup.policy.name, Path(self._scratch.name))
        try:
            self._probe(setup, name)
        except SamplingError:
            with suppress(SamplingError):
                self.endpoint.unload(name)
            raise
        self._holds, self._name = digest, name
        if old:
            self.endpoint.unload(old)
        return True

    def _probe(self, setup: Setup, name: str) -> None:
        batch = probe_batch(setup)
        own = _score(setup, batch, "live")
        before = _score(setup, batch, "base") if self._seen is None else self._seen
        said = [v for text in probe_texts(setup) for v in self.endpoint.score(name, text)]
        theirs = torch.tensor(said, dtype=torch.float64)
        off, moved = _apart(theirs, own), _apart(own, before)
        version, url = setup.engine.version, self.endpoint.url
        allowed = TOLERANCE.get(setup.policy.dtype, COARSE)
        told_apart = moved > APART * self._noise
        if told_apart and _apart(theirs, before) < off:
            raise SamplingError(
                f"the sampler at {url} still runs old weights: after the push of version {version} its log-probs of "
                f"the probe are {off:.3g} nats a token from that version and {_apart(theirs, before):.3g} from the one "
                "before. It took the push and did not apply it; look at its log, and let nothing cache between."
            )
        if not off <= allowed:
            raise SamplingError(
                f"the sampler at {url} is {off:.3g} nats a token off the trainer on the probe of version {version} "
                f"(allowed: {allowed:g}); it runs other weights. Does it serve {setup.policy.name}, in "
                f"{str(setup.policy.dtype).removeprefix('torch.')}?"
            )
        self._noise = max(self._noise, off)
        if told_apart or self._seen is None:
            self._seen = own if told_apart else before
        self.metrics |= {"sampler/probe": off, "sampler/moved": moved, "sampler/version": float(version)}

    def _check_behaviour(self, setup: Setup, rollouts: Sequence[Rollout]) -> None:
        """What the server says it sampled with must be what the trainer makes of the same tokens."""
        batch = Batch.from_rows([r.prompt for r in rollouts], [r.tokens for r in rollouts], pad=setup.policy.pad_id)
        temperature = rollouts[0].temperature
        own = _score(setup, batch, "live", temperature)
        theirs = torch.tensor([v for r in rollouts for v in r.logprobs], dtype=torch.float64)
        off = _apart(theirs, own)
        allowed = TOLERANCE.get(setup.policy.dtype, COARSE)
        if not off <= allowed:
            raise SamplingError(
                f"the sampler at {self.endpoint.url} says log-probs of what it sampled that are {off:.3g} nats a token "
                f"off those of version {setup.engine.version} at temperature {temperature:g} (allowed: {allowed:g}). "
                "vLLM reports them before temperature unless it is started with --logprobs-mode processed_logprobs."
            )
        self.metrics |= {"sampler/behaviour": off}


def _score(setup: Setup, batch: Batch, who: Literal["live", "base"], temperature: float = 1.0) -> Float[Tensor, " N"]:
    found = setup.engine.score(batch, LogProbsWanted(temperature), who)
    assert isinstance(found, Tensor)
    return found.detach().cpu().double()


def _apart(a: Float[Tensor, " N"], b: Float[Tensor, " N"]) -> float:
    """Nats a token: a mean, for in 16 bits single improbable tokens round far."""
    return float((a - b).abs().mean())
