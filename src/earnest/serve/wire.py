"""OpenAI's requests and answers. A field that the server does not support is refused by name."""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from earnest.serve.errors import BadRequest

if TYPE_CHECKING:
    from earnest.models import SampleSpec

SEED = 2**62
# Fields that are known and not supported, with the values that have no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("audio", "prediction", "reasoning_effort", "verbosity", "web_search_options"), (None,)),
    **dict.fromkeys(("tools", "functions"), (None, [])),
    **dict.fromkeys(("tool_choice", "function_call"), (None, "none", "auto")),
    "logit_bias": (None, {}),
    "parallel_tool_calls": (None, True, False),
    "modalities": (None, ["text"]),
    "service_tier": (None, "auto", "default"),
    "suffix": (None, ""),
    "best_of": (None, 1),
}


Name = Annotated[str, Field(min_length=1, max_length=200)]


class StrictBody(BaseModel):
    """A body whose keys are all known."""

    model_config = ConfigDict(extra="forbid")


class TextPart(StrictBody):
    """A part of a message; text only."""

    type: Literal["text"]
    text: str


class CalledFunction(StrictBody):
    """The function of a call; ``arguments`` is JSON text."""

    name: str
    arguments: str = "{}"


class MessageCall(StrictBody):
    """A tool call of an assistant message."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """The call for a chat template, with the arguments as a mapping if they are one."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        return {
            "id": self.id or "",
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }


class FunctionSchema(StrictBody):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool | None = None


class ToolSchema(StrictBody):
    type: Literal["function"]
    function: FunctionSchema


class ChosenFunction(StrictBody):
    name: str


class ChosenTool(StrictBody):
    """The tool that must be called."""

    type: Literal["function"]
    function: ChosenFunction


class ChatMessage(StrictBody):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, data: Any) -> Any:
        """Drop the empty fields of assistant messages that a client sends back."""
        if isinstance(data, dict):
            return {k: v for k, v in data.items() if k in cls.model_fields or v not in (None, [])}
        return data

    @model_validator(mode="after")
    def _whole(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant message has tool_calls")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is required, except in an assistant message with tool_calls")
        return self

    def plain(self) -> dict[str, Any]:
        """The message for a chat template."""
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(p.text for p in parts)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.role == "tool":
            message |= {k: v for k, v in (("tool_call_id", self.tool_call_id), ("name", self.name)) if v is not None}
        if self.reasoning_content is not None and self.role == "assistant":
            message["reasoning_content"] = self.reasoning_content
        return message


class StreamOptions(StrictBody):
    include_usage: bool = False


class JsonSchema(StrictBody):
    """A schema with a name, in OpenAI's form."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=lambda: {"type": "object"}, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictBody):
    """`text`, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _whole(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("give json_schema with the type 'json_schema', and only there")
        return self

    def schema_wanted(self) -> dict[str, Any] | None:
        """The JSON schema that an answer follows; None: free text."""
        if self.type == "text":
            return None
        return {"type": "object"} if self.json_schema is None else self.json_schema.schema_


class Sampling(StrictBody):
    """The fields of both kinds of completion."""

    model: Annotated[str, Field(min_length=1, max_length=200, description="`base`, an adapter, or ADAPTER@VERSION")]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    min_p: Annotated[float, Field(ge=0, le=1, description="leave out tokens below this share of the likeliest")] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    response_format: ResponseFormat | None = None
    top_k: Annotated[int, Field(ge=0, le=1_000_000, description="0: off")] = 0
    n: Annotated[int, Field(ge=1, le=16)] | None = 1
    stop: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]
        | None
    ) = None
    seed: Annotated[int, Field(gt=-SEED, lt=SEED)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = Field(False, description="also give the exact tokens of prompt and completion")
    store: bool | None = Field(True, description="false: keep no record; there can be no feedback on the answer")
    user: str | None = None
    metadata: dict[str, str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _offered(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = dict(data)
        for name, neutral in NEUTRAL.items():
            if name in kept and name not in cls.model_fields:
                value = kept.pop(name)
                if not any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral):
                    raise ValueError(f"{name} is not supported by this server; leave it out")
        return kept

    def stops(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def spec(self, length: int) -> SampleSpec:
        from earnest.models import SampleSpec

        return SampleSpec(
            max_new_tokens=length,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k,
            seed=secrets.randbelow(SEED) if self.seed is None else self.seed,
            stop=self.stops(),
        )


class ChatRequest(Sampling):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1000)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[ToolSchema], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None

    def offered(self) -> list[dict[str, Any]]:
        """The schemas that the chat template gets; none with tool_choice "none"."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    def forced(self) -> list[dict[str, Any]]:
        """The tools of which one must be called; none: the model decides."""
        if self.tool_choice in (None, "none", "auto"):
            return []
        if not self.tools:
            raise BadRequest("tool_choice needs tools; give at least one, or leave tool_choice out.", "tool_choice")
        if not isinstance(self.tool_choice, ChosenTool):
            return self.offered()
        name = self.tool_choice.function.name
        found = [tool for tool in self.offered() if tool["function"]["name"] == name]
        if not found:
            raise BadRequest(f"tool_choice names {name!r}, which is not among the tools.", "tool_choice")
        return found

    def length(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def top(self) -> int | None:
        """How many alternatives to show; None: no log-probs at all."""
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs: true.", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
Prompts = (
    Annotated[str, Field(min_length=1)]
    | Ids
    | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=64)]
    | Annotated[list[Ids], Field(min_length=1, max_length=64)]
)


class TextRequest(Sampling):
    """POST /v1/completions"""

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, description="0 with echo or prompt_logprobs: only those")] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_logprobs: (
        Annotated[int, Field(ge=0, le=1024, description="K most probable tokens at each prompt token, as vLLM")] | None
    ) = None
    echo: bool | None = False

    def prompts(self) -> list[str | list[int]]:
        given: Any = self.prompt
        return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


class ScoreRequest(StrictBody):
    """POST /v1/score: the log-probs of an answer."""

    model: Name
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1000)]
    completion: Annotated[str, Field(min_length=1)]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every error."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorBody} for code in (400, 401, 403, 404, 408, 409, 413, 429, 500, 503, 507)
}
