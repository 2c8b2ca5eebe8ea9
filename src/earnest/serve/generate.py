"""/inference/v1/generate: tokens in, tokens and log-probs out, in vLLM's format.

verifiers' train client and other trainers that tokenize by themselves use it. Nothing is stored. Log-probs are those of
the distribution that was sampled from. The model ``pushed`` is the adapter that was pushed last; the answer has its
name (``adapter``) and its version at the trainer (``policy_version``).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import Field, PrivateAttr
from starlette.concurrency import run_in_threadpool

from earnest.serve.completing import CompletionWork, begin, cancel, submit, wait
from earnest.serve.keys import Who
from earnest.serve.leases import Lease
from earnest.serve.state import State
from earnest.serve.wire import ERRORS, SEED, Ids, Name, StrictBody, TextRequest

if TYPE_CHECKING:
    from earnest.models import SampleSpec


class TokenSampling(StrictBody):
    """vLLM's sampling parameters. Those without an effect here are accepted at the value that has none."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] = 1
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    seed: Annotated[int, Field(gt=-SEED, lt=SEED)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = 1
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    repetition_penalty: Literal[1, None] = None
    min_tokens: Literal[0, None] = None
    prompt_logprobs: None = None
    reasoning_effort: None = None
    routed_experts_prompt_start: int | None = Field(None, description="for mixtures of experts; has no effect here")


class GenerateRequest(StrictBody):
    """POST /inference/v1/generate"""

    model: Name
    token_ids: Ids
    sampling_params: TokenSampling = Field(default_factory=TokenSampling)
    request_id: str | None = None
    stream: Literal[False, None] = False
    cache_salt: str | None = None
    priority: int | None = None


class _Tokens(TextRequest):
    """The same request as a completion of tokens."""

    _ends: tuple[int, ...] | None = PrivateAttr(None)

    def spec(self, length: int) -> SampleSpec:
        return replace(super().spec(length), stop_ids=self._ends)


def router(state: State) -> APIRouter:
    api = APIRouter(prefix="/inference/v1", responses=ERRORS, tags=["generate"])

    @api.post("/generate", response_model=None, summary="Continue tokens")
    async def generate(body: GenerateRequest, request: Request, caller: Who) -> Any:
        work = CompletionWork(state, _completion(body), caller, "text", [], body.sampling_params.max_tokens, None)
        work.id = body.request_id or work.id
        with ExitStack() as stack:
            await run_in_threadpool(begin, work, [lambda: tuple(body.token_ids)], stack)
            version = await run_in_threadpool(_policy_version, state, work.lease)
            wanted = body.sampling_params
            ends = set(wanted.stop_token_ids or ()) | (set() if wanted.ignore_eos else state.host.policy.eos_ids)
            work.body._ends = tuple(sorted(ends))  # type: ignore[union-attr]
            submitted = submit(work, None)
            try:
                (answers,) = await wait(submitted, request)
            finally:
                cancel(submitted)
            found = {
                "request_id": work.id,
                "model": body.model,
                "adapter": work.lease.model,
                "adapter_version": work.lease.version,
                "policy_version": version,
                "choices": [_choice(index, done, wanted.logprobs) for index, done in enumerate(answers)],
                "prompt_logprobs": None,
                "usage": work.usage([answers]),
            }
            return JSONResponse(found, headers=work.headers())

    return api


def _policy_version(state: State, lease: Lease) -> int | None:
    """The version of a pushed adapter at its trainer, where the trainer gave it."""
    if lease.row is None or not lease.version:
        return None
    return state.store.version(lease.row, lease.version).record.get("policy_version")


def _completion(body: GenerateRequest) -> _Tokens:
    given = body.sampling_params
    same = ("max_tokens", "n", "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed")
    fields: dict[str, Any] = {name: getattr(given, name) for name in same}
    fields |= {"top_k": max(given.top_k, 0), "stop": given.stop or None, "store": False}
    return _Tokens(model=body.model, prompt=body.token_ids, **fields)


def _choice(index: int, done: Any, logprobs: int | None) -> dict[str, Any]:
    content = [
        {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
        for token, value in zip(done.tokens, done.logprobs, strict=True)
    ]
    return {
        "index": index,
        "token_ids": list(done.tokens),
        "logprobs": None if logprobs is None else {"content": content},
        "finish_reason": "length" if done.finish == "length" else "stop",
    }
