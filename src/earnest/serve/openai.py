"""/v1/chat/completions, /v1/completions, /v1/models, /v1/score, in OpenAI's format.

Log-probs are those of the distribution that was sampled from (temperature, top-k and top-p applied; greedy: at
temperature 1), the same that the store keeps. Every answer names the version of the adapter that gave it:
``adapter_version`` in the body, ``X-Earnest-Version`` in the headers.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool

from earnest.serve.completing import CompletionWork, awaitable, begin, cancel, keep, keep_rest, submit, wait
from earnest.serve.errors import BadRequest, Conflict, error_response, no_completion
from earnest.serve.keys import Who
from earnest.serve.rows import AdapterRow
from earnest.serve.state import State
from earnest.serve.text import IncrementalText, Text
from earnest.serve.tool_wire import CallStream, message_of
from earnest.serve.wire import ERRORS, ChatRequest, ScoreRequest, TextRequest

if TYPE_CHECKING:
    from earnest.serve.decode import DecodedToken, Done, PendingRequest


STREAMS: dict[int | str, dict[str, Any]] = {
    200: {"description": "One JSON object, or with stream: true its parts as server-sent events.",
          "content": {"text/event-stream": {}}}
}  # fmt: skip


def router(state: State) -> APIRouter:
    api = APIRouter(prefix="/v1", responses=ERRORS, tags=["chat"])

    @api.post("/chat/completions", response_model=None, summary="Answer a conversation", responses=STREAMS)
    async def chat(body: ChatRequest, request: Request, caller: Who) -> Any:
        messages = [m.plain() for m in body.messages]
        tools = body.offered()
        work = CompletionWork(state, body, caller, "chat", messages, body.length(), body.top(), tools)
        return await _answer(work, request, [lambda: work.text.render(messages, tools=tools)])

    @api.post("/completions", response_model=None, summary="Continue a text", responses=STREAMS)
    async def complete(body: TextRequest, request: Request, caller: Who) -> Any:
        work = CompletionWork(state, body, caller, "text", [], body.max_tokens, body.logprobs)
        for name, asked in (("echo", bool(body.echo)), ("prompt_logprobs", body.prompt_logprobs is not None)):
            if asked and body.stream:
                raise BadRequest(f"{name} cannot be streamed here; leave one of the two out.", name)
        if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
            raise BadRequest("max_tokens is 0, so the answer is empty; give 1 or more, or echo: true.", "max_tokens")

        def tokens(prompt: str | list[int]) -> tuple[int, ...]:
            return work.text.encode(prompt) if isinstance(prompt, str) else tuple(prompt)

        return await _answer(work, request, [lambda p=p: tokens(p) for p in body.prompts()])

    @api.get("/models", summary="The models")
    def models(caller: Who) -> dict[str, Any]:
        longest = {"max_model_len": state.host.policy.positions} if state.host.ready() else {}
        data = [_model("base", None, 0), *(_model(row.name, row, row.live) for row in state.store.adapters())]
        return {"object": "list", "data": [one | longest for one in data if caller.may(one["id"], "read")]}

    @api.get("/models/{model:path}", summary="One model")
    def model(model: str, caller: Who) -> dict[str, Any]:
        caller.demand(model.partition("@")[0], "read")
        return _model(model, *state.leases.resolve(model))

    @api.get("/chat/completions/{completion_id}", summary="A stored answer")
    def given(completion_id: str, caller: Who, choice: int = 0) -> dict[str, Any]:
        found = state.store.completion(completion_id, min(max(choice, 0), 1 << 20))
        caller.demand(found.model, "read")
        if not caller.sees(found.key):
            raise no_completion(completion_id, choice)
        shown = asdict(found)
        for name in ("adapter", "key"):
            shown.pop(name)
        return {"object": "chat.completion.record", "adapter_version": shown.pop("version"), **shown}

    @api.delete("/chat/completions/{completion_id}", summary="Delete an answer and the text of the feedback on it")
    def forget(completion_id: str, caller: Who) -> dict[str, Any]:
        found = state.store.completion(completion_id)
        caller.demand(found.model, "read")
        if not caller.sees(found.key):
            raise no_completion(completion_id, 0)
        if found.key != caller.name:
            caller.demand(found.model, "delete")
        if not state.store.purge(math.inf, completion=completion_id):
            raise Conflict("the feedback on this answer is still queued; withdraw it first.", "completion_id")
        return {"object": "chat.completion.deleted", "id": completion_id, "deleted": True}

    @api.post("/score", summary="The log-probs of an answer")
    def score(body: ScoreRequest, caller: Who) -> dict[str, Any]:
        caller.demand(body.model.partition("@")[0], "read")
        state.wait()
        from earnest.serve.scoring import score_answer

        with state.leases.lease(body.model) as lease:
            found = score_answer(state, lease.adapter, [m.plain() for m in body.messages], body.completion)
            return {"object": "score", "model": body.model, "adapter_version": lease.version, **found}

    return api


def _model(name: str, row: AdapterRow | None, version: int) -> dict[str, Any]:
    """A model of the list; ``row`` None is the base."""
    created, parent = (0, None) if row is None else (int(row.created), "base")
    found = {"id": name, "object": "model", "created": created, "owned_by": "earnest"}
    return found | {"adapter_version": version, "parent": parent}


async def _answer(work: CompletionWork, request: Request, prompts: Sequence[Any]) -> Any:
    """Lease the version, submit, wait (or stream), store, answer."""
    stack = ExitStack()
    try:
        await run_in_threadpool(begin, work, prompts, stack)
        events: asyncio.Queue[tuple[int, int, DecodedToken] | None] = asyncio.Queue()
        submitted = submit(work, events if work.body.stream else None)
    except BaseException:
        stack.close()
        raise
    if work.body.stream:
        return StreamingResponse(
            _stream(work, submitted, events, stack), media_type="text/event-stream", headers=work.headers()
        )
    try:
        answers = await wait(submitted, request)
        await keep(work, answers)
        echoed = await run_in_threadpool(_echo, work) if isinstance(work.body, TextRequest) and work.body.echo else None
        whole = _whole(work, answers, echoed)
        if isinstance(work.body, TextRequest) and work.body.prompt_logprobs is not None:
            from earnest.serve.scoring import prompt_tops

            asked = (work.state, work.lease.adapter, work.body.prompt_logprobs)
            scored = [await run_in_threadpool(prompt_tops, *asked, prompt) for prompt in work.prompts]
            for choice in whole["choices"]:
                choice["prompt_logprobs"] = scored[choice["index"] // work.n]
        return JSONResponse(whole, headers=work.headers())
    finally:
        cancel(submitted)
        stack.close()


def _finish(done: Done) -> str:
    return "abort" if done.finish == "cancelled" else done.finish


def _whole(work: CompletionWork, answers: Sequence[Sequence[Done]], echoed: list[Any] | None) -> dict[str, Any]:
    from earnest.serve.decode import Done

    choices = [
        _choice(work, place, index, done, None if echoed is None else echoed[place])
        for place, found in enumerate(answers or [[Done((), (), "length")]] * len(work.prompts))
        for index, done in enumerate(found)
    ]
    ids: dict[str, Any] = {}
    if work.body.return_token_ids:
        lists = [list(p) for p in work.prompts]
        ids["prompt_token_ids"] = lists[0] if work.kind == "chat" else lists
    return {**work.head(), "choices": choices, "usage": work.usage(answers), **ids}


def _choice(work: CompletionWork, place: int, index: int, done: Done, echo: Any) -> dict[str, Any]:
    text = work.visible(done)
    shared: dict[str, Any] = {"index": place * work.n + index, "finish_reason": _finish(done)}
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if work.tools:
        message |= message_of(work.reader(place), work.raw(done))
        if message.get("tool_calls") and shared["finish_reason"] == "stop":
            shared["finish_reason"] = "tool_calls"
    if work.body.return_token_ids:
        shared["token_ids"] = list(done.tokens)
    if work.kind == "chat":
        logprobs = None if work.top is None else chat_logprobs(work.text, done)
        return {**shared, "message": message, "logprobs": logprobs}
    logprobs = None if work.top is None else text_logprobs(work.text, done, echo)
    return {**shared, "text": (echo["text"] if echo else "") + text, "logprobs": logprobs}


def _echo(work: CompletionWork) -> list[Any]:
    """The prompts' own texts and log-probs, for ``echo``."""
    from earnest.serve.scoring import score_tokens

    found = []
    for prompt in work.prompts:
        values = score_tokens(work.state, work.lease.adapter, prompt[:1], prompt[1:]) if len(prompt) > 1 else []
        found.append({"text": work.text.decode(prompt), "tokens": prompt, "logprobs": [None, *values]})
    return found


@dataclass
class _Streamed:
    """A choice while it is streamed; ``offset`` is that of its next token in its text."""

    text: IncrementalText
    calls: CallStream | None
    offset: int = 0

    def deltas(self, text: str, last: bool = False) -> list[dict[str, Any]]:
        """The deltas that new text makes."""
        if self.calls is not None:
            return self.calls.feed(text, last)
        return [{"content": text}] if text or not last else []


async def _stream(
    work: CompletionWork, submitted: Sequence[PendingRequest], events: asyncio.Queue[Any], stack: ExitStack
) -> AsyncIterator[str]:
    """The chunks, token by token; the completion is on the disk before its last chunk."""
    from earnest.serve.decode import Done

    chat = work.kind == "chat"
    streamed: dict[tuple[int, int], _Streamed] = {}
    ended = asyncio.gather(*(awaitable(f.future) for f in submitted), return_exceptions=True)
    ended.add_done_callback(lambda _: events.put_nowait(None))

    def chunk(choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps({**work.head('.chunk'), 'choices': choices, **more})}\n\n"

    def choice_at(place: int, index: int) -> _Streamed:
        if (place, index) not in streamed:
            text = IncrementalText(work.text, work.body.stops(), bool(work.tools))
            streamed[place, index] = _Streamed(text, CallStream(work.reader(place)) if work.tools else None)
        return streamed[place, index]

    def piece(place: int, index: int, delta: dict[str, Any], step: DecodedToken | None) -> str:
        choice: dict[str, Any] = {"index": place * work.n + index, "finish_reason": None, "logprobs": None}
        if step is not None and work.body.return_token_ids:
            choice["token_ids"] = [step.token]
        if step is not None and work.top is not None:
            done = Done((step.token,), (step.logprob,), "length", (step.top,))
            if chat:
                choice["logprobs"] = chat_logprobs(work.text, done)
            else:
                logprobs = choice["logprobs"] = text_logprobs(work.text, done, None, choice_at(place, index).offset)
                choice_at(place, index).offset += len(logprobs["tokens"][0])
        return chunk([choice | ({"delta": delta} if chat else {"text": delta["content"]})])

    finished = False
    try:
        if chat:
            for index in range(work.n):
                delta = {"role": "assistant", "content": "", "refusal": None}
                yield chunk([{"index": index, "finish_reason": None, "logprobs": None, "delta": delta}])
        while (found := await events.get()) is not None:
            place, index, step = found
            text = choice_at(place, index).text.feed(step.token)
            every = work.top is not None or bool(work.body.return_token_ids)  # a chunk for every token
            if text or every:
                shown: DecodedToken | None = step
                for delta in choice_at(place, index).deltas(text) or [{}] * every:
                    yield piece(place, index, delta, shown)
                    shown = None
        await ended
        outcomes = [pending.result() for pending in submitted]
        await keep(work, outcomes)
        finished = True
        for place, answers in enumerate(outcomes):
            for index, done in enumerate(answers):
                choice = choice_at(place, index)
                for delta in choice.deltas(choice.text.rest(), last=True):
                    yield piece(place, index, delta, None)
                called = choice.calls is not None and choice.calls.reader.calls
                finish = "tool_calls" if called and _finish(done) == "stop" else _finish(done)
                last: dict[str, Any] = {"index": place * work.n + index, "finish_reason": finish}
                yield chunk([{**last, "logprobs": None, **({"delta": {}} if chat else {"text": ""})}])
        if work.body.stream_options is not None and work.body.stream_options.include_usage:
            yield chunk([], usage=work.usage(outcomes))
        yield "data: [DONE]\n\n"
    except Exception as error:
        yield f"data: {json.dumps(error_response(error)[1])}\n\n"
    finally:
        cancel(submitted)
        if not finished:  # the client disconnected: what it received is stored
            work.state.later(keep_rest(work, submitted, stack))
        else:
            stack.close()


def chat_logprobs(text: Text, done: Done) -> dict[str, Any]:
    """{"content": [{token, logprob, bytes, top_logprobs}, …]}, one per token, with the token that ends the turn."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": text.decode([token], special=True), "logprob": logprob, "bytes": text.bytes_of(token)}

    tops = done.tops or ((),) * len(done.tokens)
    content = [
        {**entry(token, logprob), "top_logprobs": [entry(t, v) for t, v in top]}
        for token, logprob, top in zip(done.tokens, done.logprobs, tops, strict=True)
    ]
    return {"content": content, "refusal": None}


def text_logprobs(text: Text, done: Done, echo: dict[str, Any] | None, start: int = 0) -> dict[str, Any]:
    """{"tokens", "token_logprobs", "top_logprobs", "text_offset"}, with those of an echoed prompt first; ``start`` is
    the offset of the first token, if earlier chunks were sent."""
    front = [] if echo is None else list(echo["tokens"])
    values: list[float | None] = [] if echo is None else list(echo["logprobs"])
    said = [text.decode([t], special=True) for t in [*front, *done.tokens]]
    tops: list[dict[str, float] | None] = [None] * len(front)
    tops += [{text.decode([t], special=True): v for t, v in top} for top in done.tops or ((),) * len(done.tokens)]
    offsets, place = [], start
    for word in said:
        offsets.append(place)
        place += len(word)
    return {
        "tokens": said,
        "token_logprobs": [*values, *done.logprobs],
        "top_logprobs": tops,
        "text_offset": offsets,
    }
