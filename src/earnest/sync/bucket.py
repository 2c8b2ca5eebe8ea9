"""Samplers that reach only a bucket: the trainer writes requests, `earnest sampler URL` writes the answers.

config.yaml                      the run's settings, from which a sampler builds policy and adapter
samplers/{i}/version/{digest}    the adapter's weights for sampler i
samplers/{i}/request/{n}         score rows, sample prompts, or end; names the version that it is about
samplers/{i}/answer/{n}          written once: a sampler that is started again answers the open requests

The trainer removes a request with its answer, and a version when the next one is pushed.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from earnest.engines.local import LocalEngine
from earnest.errors import EarnestError, SamplingError
from earnest.models import SampleSpec
from earnest.rollouts.rollout import Rollout
from earnest.store import Bucket, StoreError
from earnest.sync.base import SamplerEngine, Weights

CONFIG = "config.yaml"
POLL = 0.2
"""Seconds between two looks at first; they double up to SLOWEST while there is no request."""
SLOWEST = 5.0


class BucketSampler:
    """The trainer's side. ``timeout``: seconds that a request may stay without an answer."""

    plain: bool | None = None

    def __init__(self, bucket: Bucket, number: int, timeout: float = 600.0) -> None:
        self.bucket, self.timeout = bucket, timeout
        self.prefix = f"samplers/{number:05d}/"
        self.place = f"sampler {number} of {bucket.url}"
        self._command = f"`earnest sampler {bucket.url} --number {number}`"
        self._session, self._count, self._version = uuid.uuid4().hex[:8], 0, ""
        bucket.delete(bucket.list(self.prefix))  # left by an earlier trainer

    def push(self, weights: Weights) -> None:
        from safetensors.torch import save

        old = self.bucket.list(f"{self.prefix}version/")
        self._version = f"{self.prefix}version/{self._session}-{weights.digest}"
        payload = save({k: v.contiguous().clone() for k, v in weights.state.items()})
        self.bucket.create(self._version, "version", payload, {"version": weights.version})
        self.bucket.delete(key for key in old if key != self._version)

    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        return [float(x) for x in self._ask({"do": "score", "rows": [list(r) for r in rows]})]

    def sample(self, prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec) -> list[Rollout]:
        found = self._ask({"do": "sample", "prompts": [list(p) for p in prompts], "n": n, "spec": asdict(spec)})
        return TypeAdapter(list[Rollout]).validate_python(found)

    def restart(self) -> None:
        raise SamplingError(f"{self.place} is gone; start {self._command} again, then resume the run.")

    def close(self) -> None:
        """End the sampler's process; one that starts later finds no request."""
        with suppress(StoreError):
            self._write({"do": "end"})

    def _write(self, request: Mapping[str, Any]) -> str:
        self._count += 1
        name = f"{self._session}-{self._count:08d}"
        self.bucket.create(
            f"{self.prefix}request/{name}", "request", json.dumps({**request, "at": self._version}).encode()
        )
        return name

    def _ask(self, request: Mapping[str, Any]) -> Any:
        name = self._write(request)
        began, pause = time.monotonic(), POLL
        while (found := self.bucket.get(f"{self.prefix}answer/{name}")) is None:
            if time.monotonic() - began > self.timeout:
                raise SamplingError(
                    f"{self.place} did not answer within {self.timeout:g} s. Is {self._command} running?"
                )
            time.sleep(pause)
            pause = min(SLOWEST, 1.5 * pause)
        self.bucket.delete([f"{self.prefix}request/{name}", found.key])
        answer = json.loads(found.payload)
        if "error" in answer:
            raise SamplingError(f"{self.place}: {answer['error']}")
        return answer["found"]


def serve(bucket: Bucket, number: int, engine: LocalEngine) -> None:
    """Run as sampler ``number``: answer its requests in their order until the trainer ends it."""
    sampler, holds = SamplerEngine(engine), ""
    prefix, pause = f"samplers/{number:05d}/", POLL
    while True:
        requests = bucket.list(f"{prefix}request/")
        done = bucket.list(f"{prefix}answer/") if requests else []
        requests = [key for key in requests if _REQUEST.search(key)]  # other programs leave keys of their own
        open_ = [key for key in requests if key.replace("/request/", "/answer/") not in done]
        for key in open_:
            found = bucket.get(key)
            if found is None:
                continue
            request = json.loads(found.payload)
            if request["do"] == "end":
                bucket.delete([key])
                return
            try:
                holds = _hold(bucket, sampler, holds, request["at"])
                answer = {"found": _answer(sampler, request)}
            except EarnestError as error:
                answer = {"error": str(error)}
            bucket.create(key.replace("/request/", "/answer/"), "answer", json.dumps(answer).encode())
        pause = POLL if open_ else min(SLOWEST, 1.5 * pause)
        time.sleep(pause)


_REQUEST = re.compile(r"/request/[0-9a-f]{8}-\d{8}$")


def _hold(bucket: Bucket, sampler: SamplerEngine, holds: str, wanted: str) -> str:
    from safetensors.torch import load

    if wanted != holds:
        found = bucket.get(wanted)
        if found is None:
            raise SamplingError(f"the weights {wanted} are gone from the bucket.")
        sampler.push(int(found.meta["version"]), load(found.payload))
    return wanted


def _answer(sampler: SamplerEngine, request: Mapping[str, Any]) -> Any:
    if request["do"] == "score":
        return sampler.score(request["rows"])
    spec = TypeAdapter(SampleSpec).validate_python(request["spec"])
    return [asdict(r) for r in sampler.sample(request["prompts"], request["n"], spec)]
