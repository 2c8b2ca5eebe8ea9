"""From a request to stored answers: lease the version, submit, wait, store. Both kinds of completion share it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fastapi import Request

from earnest.errors import SamplingError
from earnest.models.tool_calls import MessageReader
from earnest.serve.errors import BadRequest, Busy, TooLong, error_response
from earnest.serve.keys import Caller
from earnest.serve.leases import Lease
from earnest.serve.rows import StoredCompletion
from earnest.serve.state import State
from earnest.serve.text import cut
from earnest.serve.tool_wire import forced_call
from earnest.serve.wire import ChatRequest, TextRequest

if TYPE_CHECKING:
    from earnest.serve.decode import DecodedToken, Done, PendingRequest, Shaping

T = TypeVar("T")


def awaitable(future: Future[T]) -> asyncio.Future[T]:
    """Done when a thread's ``future`` is, with its result or its error; cancelling it cancels no work."""
    return asyncio.shield(asyncio.wrap_future(future))


@dataclass(eq=False)
class CompletionWork:
    """One request: the version that answers it, its settings, and its record."""

    state: State
    body: ChatRequest | TextRequest
    caller: Caller
    kind: Literal["chat", "text"]
    messages: list[dict[str, Any]]
    length: int | None
    top: int | None
    tools: Sequence[Mapping[str, Any]] = ()
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    lease: Lease = field(init=False)
    shaping: Shaping = field(init=False)

    def __post_init__(self) -> None:
        self.caller.demand(self.body.model.partition("@")[0], "read")
        self.id = f"{'chatcmpl' if self.kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.n = self.body.n or 1

    @property
    def text(self) -> Any:
        return self.state.text

    def room(self, prompt: Sequence[int]) -> int:
        """How many tokens the answer may have."""
        limit = self.state.host.policy.positions
        asked = self.state.settings.max_tokens if self.length is None else self.length
        if limit is None:
            return asked
        left = limit - len(prompt)
        if left < 1 or (self.length is not None and self.length > left):
            raise TooLong(
                f"the prompt has {len(prompt)} tokens and the answer may have {asked}; {self.state.host.policy.name} "
                f"has room for {limit} together. Shorten the prompt, or lower max_tokens.",
                "messages" if self.kind == "chat" else "prompt",
            )
        return min(asked, left)

    def shape(self) -> None:
        """Compile the request's changes of the logits: penalties, min-p and grammar."""
        from earnest.serve.decode import Shaping

        body = self.body
        schema = None if body.response_format is None else body.response_format.schema_wanted()
        grammar = None if schema is None else self.state.host.grammars.json(schema)
        if isinstance(body, ChatRequest) and (forced := body.forced()):
            if grammar is not None:
                raise BadRequest(
                    "response_format and a required tool exclude each other; leave one out.", "tool_choice"
                )
            grammar = forced_call(self.state.host, forced)
        self.shaping = Shaping(body.presence_penalty or 0.0, body.frequency_penalty or 0.0, body.min_p, grammar)

    def record(self, prompt: int, index: int, done: Done) -> StoredCompletion:
        spec, shaping = self.body.spec(1), self.shaping
        sampling = {name: getattr(spec, name) for name in ("temperature", "top_p", "top_k")} | {
            "min_p": shaping.min_p,
            "presence_penalty": shaping.presence,
            "frequency_penalty": shaping.frequency,
            "json": shaping.grammar is not None,
            "seed": self.body.seed,
            "tools": self.tools,
            "metadata": self.body.metadata or {},
        }
        return StoredCompletion(
            id=self.id,
            choice=prompt * self.n + index,
            model=self.lease.model,
            version=self.lease.version,
            kind=self.kind,
            messages=self.messages,
            prompt=self.prompts[prompt],
            tokens=done.tokens,
            logprobs=done.logprobs,
            temperature=spec.temperature or 1.0,
            text=self.visible(done),
            finish=done.finish,
            adapter=None if self.lease.row is None else self.lease.row.id,
            key=self.caller.name,
            sampling=sampling,
        )

    def reader(self, prompt: int) -> MessageReader:
        """Reads the tool calls of an answer."""
        before = self.text.decode(self.prompts[prompt][-64:], special=True)
        return MessageReader(self.state.host.policy, before, self.tools)

    def raw(self, done: Done) -> str:
        """The text with its special tokens, without the one that ends the turn."""
        ends = self.state.host.policy.eos_ids
        kept = done.tokens[:-1] if done.tokens and done.tokens[-1] in ends else done.tokens
        return cut(self.text.decode(kept, special=True), self.body.stops())

    def visible(self, done: Done) -> str:
        return cut(self.text.decode(done.tokens), self.body.stops())

    def head(self, suffix: str = "") -> dict[str, Any]:
        name = "chat.completion" if self.kind == "chat" else "text_completion"
        return {
            "id": self.id,
            "object": name + (suffix if self.kind == "chat" else ""),
            "created": self.created,
            "model": self.body.model,
            "system_fingerprint": f"fp_{self.state.host.policy.fingerprint()[:12]}",
            "adapter_version": self.lease.version,
        }

    def headers(self) -> dict[str, str]:
        return {"X-Earnest-Version": str(self.lease.version), "X-Request-ID": self.id}

    def usage(self, answers: Sequence[Sequence[Done]]) -> dict[str, int]:
        prompt = sum(map(len, self.prompts))
        answer = sum(len(d.tokens) for found in answers for d in found)
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def begin(work: CompletionWork, prompts: Sequence[Any], stack: ExitStack) -> None:
    work.state.wait()
    work.lease = stack.enter_context(work.state.leases.lease(work.body.model))
    if work.lease.row is not None:
        work.caller.demand(work.lease.row.name, "read")
    work.prompts = [make() for make in prompts]
    try:
        work.shape()
    except SamplingError as error:
        raise BadRequest(str(error), "response_format") from None


def submit(
    work: CompletionWork, events: asyncio.Queue[tuple[int, int, DecodedToken] | None] | None
) -> list[PendingRequest]:
    from earnest.serve.decode import QueueFull
    from earnest.serve.decode import Request as Wanted

    loop = asyncio.get_running_loop()
    submitted: list[PendingRequest] = []
    if work.length == 0:
        return submitted
    try:
        for place, prompt in enumerate(work.prompts):

            def on_step(index: int, step: DecodedToken, place: int = place) -> None:
                loop.call_soon_threadsafe(events.put_nowait, (place, index, step))  # type: ignore[union-attr]

            spec, told = work.body.spec(work.room(prompt)), None if events is None else on_step
            wanted = Wanted(prompt, spec, work.lease.adapter, work.n, work.top or 0, work.shaping, told)
            submitted.append(work.state.host.decoder.submit(wanted))
    except BaseException as error:
        cancel(submitted)
        if isinstance(error, QueueFull):
            raise Busy(str(error)) from None
        if isinstance(error, SamplingError):
            raise BadRequest(str(error)) from None
        raise
    return submitted


def cancel(submitted: Sequence[PendingRequest]) -> None:
    for pending in submitted:
        pending.cancel()


async def wait(submitted: Sequence[PendingRequest], request: Request) -> list[list[Done]]:
    """Wait for all answers; if the client disconnects, its sequences leave the batch."""
    waiting = asyncio.gather(*(awaitable(f.future) for f in submitted))
    while not waiting.done():
        await asyncio.wait([waiting], timeout=0.5)
        if not waiting.done() and await request.is_disconnected():
            cancel(submitted)
    return list(waiting.result())


async def keep(work: CompletionWork, answers: Sequence[Sequence[Done]]) -> None:
    """Store the answers, before the client gets their id."""
    rows = [work.record(p, i, d) for p, found in enumerate(answers) for i, d in enumerate(found)]
    if rows and work.body.store is not False:
        await awaitable(work.state.store.add_completions(rows))


async def keep_rest(work: CompletionWork, submitted: Sequence[PendingRequest], stack: ExitStack) -> None:
    try:
        outcomes = await asyncio.gather(*(awaitable(f.future) for f in submitted), return_exceptions=True)
        # A failed request keeps its place, so that each answer stays with its own prompt.
        await keep(work, [[] if isinstance(o, BaseException) else o for o in outcomes])
    except Exception as error:
        error_response(error)  # logs it: no request waits for this answer
    finally:
        stack.close()
