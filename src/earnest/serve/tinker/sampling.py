"""Sample requests: prompts are scored here, completions come from the host's decoder, which chats share."""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from earnest.serve import scoring
from earnest.serve.tinker import wire
from earnest.serve.tinker.data import Failed, SampleOutput, Sequence, Top
from earnest.serve.tinker.errors import WireError
from earnest.serve.tinker.futures import Promise, failure
from earnest.serve.tinker.samplers import WeightSource, attach

if TYPE_CHECKING:
    from earnest.models import SampleSpec
    from earnest.serve.decode import Done, PendingRequest
    from earnest.serve.host import Host

_CLOSING = Failed("the server is shutting down.", "server")
_PARAMS = {"max_tokens", "seed", "stop", "temperature", "top_k", "top_p"}
_FIELDS = {
    "num_samples", "prompt", "sampling_params", "base_model", "model_path", "sampling_session_id", "seq_id",
    "prompt_logprobs", "topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k",
    "prompt_logprobs_last_n", "record_stability_info", "type",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class SampleRequest:
    """A request from the wire, with checked fields."""

    prompt: tuple[int, ...]
    n: int
    params: Mapping[str, Any]
    top: int
    asked: scoring.PromptQuery

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> SampleRequest:
        if unknown := set(body) - _FIELDS:
            raise WireError(f"the sample request has {sorted(unknown)}, which this server does not support.")
        if body.get("record_stability_info"):
            raise WireError("record_stability_info: stable_reinforce is not served; leave it out.")
        params = dict(body["sampling_params"])
        if unknown := set(params) - _PARAMS:
            raise WireError(f"sampling_params has {sorted(unknown)}; it takes {sorted(_PARAMS)}.")
        given = body.get("target_prompt_logprobs")
        seed = params.get("seed")
        params["seed"] = secrets.randbits(62) if seed is None else int(seed) & (2**62 - 1)
        asked = scoring.PromptQuery(
            logprobs=bool(body.get("prompt_logprobs")),
            top=int(body.get("topk_prompt_logprobs") or 0),
            targets=None if given is None else wire.json_cells(given, "target_prompt_logprobs"),
            draws=int(body.get("prompt_alt_tokens_k") or 0),
            last=body.get("prompt_logprobs_last_n"),
            temperature=float(params.get("temperature", 1.0)),
            seed=params["seed"],
        )
        n, top = int(body.get("num_samples", 1)), int(body.get("topk_sample_logprobs") or 0)
        if not 1 <= n <= 1024:
            raise WireError(f"num_samples is {n}; give 1 … 1024.")
        return cls(tuple(wire.json_tokens(body["prompt"], "the prompt")), n, params, top, asked)

    def spec(self, host: Host) -> SampleSpec:
        from earnest.models import SampleSpec

        p = self.params
        room = host.policy.positions
        most = p.get("max_tokens")
        if most is None:
            if room is None:
                raise WireError("max_tokens is missing, and this model has no limit of its own; give one.")
            most = max(1, room - len(self.prompt) + 1)
        # The given texts and ids end a completion, and so does the end of a turn; an empty list turns both off.
        stop = p.get("stop")
        given = [] if stop is None else [stop] if isinstance(stop, str) else list(stop)
        texts = tuple(s for s in given if isinstance(s, str))
        ids = frozenset(int(s) for s in given if not isinstance(s, str))
        top_k = int(p.get("top_k", -1))
        return SampleSpec(
            max_new_tokens=int(most),
            temperature=float(p.get("temperature", 1.0)),
            top_p=float(p.get("top_p", 1.0)),
            top_k=0 if top_k == -1 else top_k,
            seed=p["seed"],
            stop=texts,
            stop_ids=None if stop is None else tuple(sorted(ids | host.policy.eos_ids)) if given else (),
        )


@dataclass(eq=False)
class _Job:
    promise: Promise
    request: SampleRequest
    key: str
    source: WeightSource
    scores: SampleOutput = SampleOutput(())
    submitted: list[PendingRequest] = field(default_factory=list)
    left: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class SampleQueue:
    """One thread that scores prompts and passes completions to the decoder, in the order of arrival."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()

    def put(self, promise: Promise, request: SampleRequest, key: str, source: WeightSource) -> None:
        with self._lock:
            if self._stopping.is_set():
                promise.set(_CLOSING)
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="earnest-tinker-samples", daemon=True)
                self._thread.start()
            self._jobs.put(_Job(promise, request, key, source))

    def close(self) -> None:
        """Start the request that is being started and fail those that wait."""
        with self._lock:
            self._stopping.set()
            self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._stopping.is_set():
                job.promise.set(_CLOSING)
                continue
            try:
                self._start(job)
            except Exception as error:
                job.promise.set(_CLOSING if self._stopping.is_set() else failure(error))

    def _start(self, job: _Job) -> None:
        from earnest.serve import decode

        self.host.wait(self.host.settings.load_wait)
        policy, request = self.host.policy, job.request
        vocabulary = policy.head.weight.shape[0]
        if not 0 <= request.top <= vocabulary:
            raise WireError(f"topk_sample_logprobs is {request.top}; give 0 … {vocabulary}.")
        spec = request.spec(self.host)
        decode.check(policy, decode.Request(request.prompt, spec))
        scoring.check_query(request.asked, request.prompt, vocabulary)
        adapter = None if job.source is None else attach(self.host, job.key, job.source)
        try:
            if request.asked.any:
                with self.host.turn("tinker", adapter):
                    job.scores = scoring.score_prompt(policy, request.prompt, request.asked)
            most = min(self.host.settings.max_rows, self.host.settings.max_waiting)
            for size, own in _parts(request.n, spec, most):
                job.submitted.append(self._submit(decode.Request(request.prompt, own, adapter, size, request.top)))
        except BaseException:
            for pending in job.submitted:
                pending.cancel()
            self._release(job)
            raise
        job.left = len(job.submitted)
        for pending in job.submitted:
            pending.future.add_done_callback(lambda _: self._finish(job))

    def _submit(self, request: Any) -> PendingRequest:
        from earnest.serve.decode import QueueFull

        while True:
            try:
                return self.host.decoder.submit(request)
            except QueueFull:
                if self._stopping.wait(0.02):
                    raise

    def _release(self, job: _Job) -> None:
        if job.source is not None:
            self.host.cache.release(job.key)

    def _finish(self, job: _Job) -> None:
        """Called when a part is decoded, mostly in the decoder's thread, so it must not compute or take a turn."""
        with job.lock:
            job.left -= 1
            if job.left:
                return
        self._release(job)
        failed = next((e for f in job.submitted if (e := f.future.exception()) is not None), None)
        if failed is not None:
            job.promise.set(failure(failed))
            return
        found = [done for pending in job.submitted for done in pending.future.result()]
        job.promise.set(replace(job.scores, sequences=tuple(_sequence(done, job.request.top) for done in found)))


def _parts(n: int, spec: SampleSpec, most: int) -> list[tuple[int, SampleSpec]]:
    """``n`` completions as requests of at most ``most``, each with a seed of its own."""
    seeds = [spec.seed, *((spec.seed + k * 0x9E3779B9) % 2**62 for k in range(1, -(-n // most)))]
    return [(min(most, n - k * most), replace(spec, seed=seed)) for k, seed in enumerate(seeds)]


def _sequence(done: Done, k: int) -> Sequence:
    finish = "stop" if done.finish == "stop" else "length"
    top = None
    if k and done.tops:
        ids = torch.zeros(len(done.tops), k, dtype=torch.long)
        logprobs = torch.full((len(done.tops), k), wire.EMPTY_LOGPROB)
        for row, cells in enumerate(done.tops):
            for column, (token, value) in enumerate(cells):
                ids[row, column], logprobs[row, column] = token, value
        top = Top(ids, logprobs, (True,) * len(done.tops))
    return Sequence(done.tokens, done.logprobs, cast(Any, finish), top)
