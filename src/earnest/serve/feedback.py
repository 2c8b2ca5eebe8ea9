"""/v1/feedback: users' feedback on completions. A 202 means that it is on the disk."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import Discriminator, Field, Tag, model_validator

from earnest.serve.errors import BadRequest, Conflict, NotFound, no_completion
from earnest.serve.keys import Caller, Who
from earnest.serve.rows import AdapterRow, NewFeedback
from earnest.serve.state import State
from earnest.serve.store import PUSHED
from earnest.serve.wire import ERRORS, StrictBody

MOST = 256
Words = Annotated[str, Field(min_length=1, max_length=20_000)]


class FeedbackItem(StrictBody):
    """At least one of ``text``, ``thumbs`` and ``better``."""

    completion_id: Annotated[str, Field(min_length=1, max_length=100)]
    choice: Annotated[int, Field(ge=0, lt=1024, description="which of the completion's choices")] = 0
    text: Words | None = Field(None, description="the feedback as text")
    thumbs: Literal["up", "down"] | None = None
    better: Words | None = Field(None, description="the answer that the user wanted")
    adapter: Annotated[str, Field(max_length=200)] | None = Field(
        None, description="the adapter that learns from it; none: the one that answered"
    )
    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,100}$")] | None = Field(
        None, description="your own id for it; feedback that is sent twice with it counts once"
    )

    @model_validator(mode="after")
    def _not_empty(self) -> FeedbackItem:
        if not any(v is not None and v.strip() for v in (self.text, self.thumbs, self.better)):
            raise ValueError("is empty; give text, thumbs ('up' or 'down') or better")
        return self


class FeedbackBatch(StrictBody):
    """Several feedbacks: all are accepted or none."""

    feedback: Annotated[list[FeedbackItem], Field(min_length=1, max_length=MOST)]


def _form(body: object) -> str:
    return "List" if isinstance(body, FeedbackBatch) or (isinstance(body, dict) and "feedback" in body) else "One"


Given = Annotated[
    Annotated[FeedbackItem, Tag("One")] | Annotated[FeedbackBatch, Tag("List")],
    Discriminator(_form),
]


def router(state: State) -> APIRouter:
    api = APIRouter(prefix="/v1", responses=ERRORS, tags=["feedback"])

    @api.post("/feedback", status_code=202, summary="Give feedback on an answer")
    def give(body: Given, caller: Who) -> dict[str, Any]:
        items = body.feedback if isinstance(body, FeedbackBatch) else [body]
        said = [_new_feedback(state, item, caller) for item in items]
        rows = state.store.add_feedback(said, caller.name, state.settings.max_queued)
        shown = []
        for (_, adapter), (row, known) in zip(said, rows, strict=True):
            shown.append({"object": "feedback", **row.public(adapter.name), "known_already": known})
            if not known:
                state.bus.publish("feedback", adapter.name, **row.public(adapter.name))
        if state.learner is not None:
            state.learner.wake()
        return {"object": "list", "data": shown} if isinstance(body, FeedbackBatch) else shown[0]

    @api.get("/feedback", summary="The latest feedback")
    def recent(
        adapter: Annotated[str, Query(max_length=200)], caller: Who, limit: Annotated[int, Query(ge=1, le=1000)] = 50
    ) -> dict[str, Any]:
        caller.demand(adapter, "read")
        row = state.store.adapter(adapter)
        found = state.store.recent_feedback(row.id, limit, caller.name if caller.own else None)
        return {
            "object": "list",
            "counts": state.store.counts(row.id),
            "data": [{"object": "feedback", **f.public(adapter)} for f in found],
        }

    @api.get("/feedback/{feedback_id}", summary="The status of a feedback")
    def one(feedback_id: str, caller: Who) -> dict[str, Any]:
        found = state.store.feedback(feedback_id)
        adapter = state.store.adapter_by_id(found.adapter)
        if adapter is None or not caller.may(adapter.name, "read") or not caller.sees(found.key):
            raise NotFound(f"there is no feedback {feedback_id[:80]!r}.", "id")
        return {"object": "feedback", **found.public(adapter.name)}

    @api.delete("/feedback/{feedback_id}", summary="Withdraw a feedback that is still queued")
    def withdraw(feedback_id: str, caller: Who) -> dict[str, Any]:
        shown = one(feedback_id, caller)
        caller.demand(shown["adapter"], "teach")
        row = state.store.adapter(shown["adapter"])
        if not state.store.cancel(row.id, feedback_id):
            raise Conflict(
                f"the feedback {feedback_id[:80]!r} is {shown['status']}; only a queued one can be withdrawn."
            )
        return one(feedback_id, caller)

    return api


def _new_feedback(state: State, item: FeedbackItem, caller: Caller) -> tuple[NewFeedback, AdapterRow]:
    completion = state.store.completion(item.completion_id, item.choice)
    caller.demand(completion.model, "read")
    if not caller.sees(completion.key):
        raise no_completion(item.completion_id, item.choice)
    if item.adapter is not None:
        name = item.adapter
    elif completion.adapter is not None:
        row = state.store.adapter_by_id(completion.adapter)
        if row is None:
            raise NotFound(f"the adapter {completion.model!r} that gave {completion.id} is deleted.", "completion_id")
        name = row.name
    else:
        raise BadRequest(
            f"{completion.id} was answered by the base model, which does not learn; name the adapter that learns, "
            'as "adapter": "NAME".',
            "adapter",
        )
    if name == "base":
        raise BadRequest("the base model does not learn; name an adapter.", "adapter")
    caller.demand(name, "teach")
    if not completion.tokens:
        raise BadRequest(f"{completion.id} has no tokens; there is nothing to learn from.", "completion_id")
    adapter = state.store.adapter(name)
    if adapter.origin == PUSHED:
        raise Conflict(f"{name} is trained elsewhere and pushed here, so it does not learn here.", "adapter")
    return NewFeedback(item.completion_id, item.choice, item.text, item.thumbs, item.better, item.id), adapter
