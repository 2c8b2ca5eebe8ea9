"""Tools on the OpenAI wire, through the official client; tokens in and out, through verifiers' train client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from earnest.models import SampleSpec, places, sample
from earnest.models.tool_calls import read_message
from earnest.serve import lessons
from earnest.serve.learning import LearnConfig
from earnest.serve.lessons import _teacher_prompt
from earnest.serve.rows import FeedbackRow
from tests.serve.conftest import Live


def _schema(name: str, parameter: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS: Any = [_schema("weather", "city"), _schema("price", "item"), _schema("clock", "city")]
ASKED: Any = [{"role": "user", "content": "What does the lamp cost?"}]
GREEDY: Any = {"model": "base", "temperature": 0, "max_tokens": 40}


@pytest.fixture(scope="module")
def client(live: Live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_a_call_its_result_and_the_answer(client: openai.OpenAI, live: Live) -> None:
    first = client.chat.completions.create(messages=ASKED, tools=TOOLS, **GREEDY).choices[0]
    (call,) = first.message.tool_calls
    assert (first.finish_reason, first.message.content) == ("tool_calls", None)
    assert (call.function.name, json.loads(call.function.arguments)) == ("price", {"item": "lamp"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "37 coins"}
    messages = [*ASKED, first.message, result]
    second = client.chat.completions.create(messages=messages, tools=TOOLS, **GREEDY)
    assert second.choices[0].message.content == "The lamp costs 37 coins."
    assert second.choices[0].finish_reason == "stop" and second.choices[0].message.tool_calls is None
    plain = [ASKED[0], {"role": "assistant", "content": "", "tool_calls": [call.to_dict()]}, result]
    assert live.state.store.completion(second.id).prompt == tuple(live.state.host.policy.render(plain, tools=TOOLS))


def test_streamed_calls_are_those_of_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=ASKED, tools=TOOLS, **GREEDY).choices[0]
    with client.chat.completions.stream(messages=ASKED, tools=TOOLS, **GREEDY) as stream:
        for _ in stream:
            pass
        found = stream.get_final_completion().choices[0]
    assert found.finish_reason == "tool_calls" and not found.message.content
    assert found.message.tool_calls[0].function.arguments == whole.message.tool_calls[0].function.arguments
    assert found.message.tool_calls[0].function.name == "price"


def test_a_streamed_call_shows_no_marks_and_every_token(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(messages=ASKED, tools=TOOLS, stream=True, logprobs=True, **GREEDY))
    deltas = [c.choices[0].delta for c in chunks]
    assert "".join(d.content or "" for d in deltas) == ""
    assert sum(len(d.tool_calls or ()) for d in deltas) == 1
    shown = [t.token for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    whole = client.chat.completions.create(messages=ASKED, tools=TOOLS, logprobs=True, **GREEDY)
    assert shown == [t.token for t in whole.choices[0].logprobs.content]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "clock"}}])
def test_a_forced_call_is_always_valid(client: openai.OpenAI, choice: Any) -> None:
    found = client.chat.completions.create(
        model="base", messages=[{"role": "user", "content": "Hello!"}], tools=TOOLS, tool_choice=choice, n=4, seed=3,
        max_tokens=120,
    )  # fmt: skip
    ended = [c for c in found.choices if c.finish_reason != "length"]
    assert ended
    for one in ended:
        (call,) = one.message.tool_calls
        arguments = json.loads(call.function.arguments)
        wanted = {"weather": "city", "price": "item", "clock": "city"}[call.function.name]
        assert set(arguments) == {wanted} and isinstance(arguments[wanted], str)
        assert choice == "required" or call.function.name == "clock"


def test_without_tools_and_with_none_the_text_stays_as_it_is(client: openai.OpenAI, live: Live) -> None:
    """Asked to copy a call, nano writes its marks as text; nothing is read without tools."""
    policy = live.state.host.policy
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        found = client.chat.completions.create(messages=ASKED, **GREEDY, **more)
        stored = live.state.store.completion(found.id)
        assert found.choices[0].message.tool_calls is None
        assert found.choices[0].message.content == policy.decode(stored.tokens)
        assert stored.prompt == tuple(policy.render(ASKED))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sing"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0"),
        ({"messages": [{**ASKED[0], "tool_calls": [{"function": {"name": "f"}}]}]}, "messages.0"),
    ],
)
def test_what_cannot_be_done_is_refused(live: Live, more: dict[str, Any], param: str) -> None:
    found = live.http.post("/v1/chat/completions", json={**GREEDY, "messages": ASKED, **more})
    assert (found.status_code, found.json()["error"]["param"]) == (400, param)


def test_feedback_teaches_with_the_tools_that_the_policy_saw(client: openai.OpenAI, live: Live) -> None:
    found = client.chat.completions.create(messages=ASKED, tools=TOOLS, **{**GREEDY, "model": "assistant"})
    kept = live.state.store.completion(found.id)
    assert kept.sampling["tools"] == TOOLS
    feedback: Any = type("F", (), {"thumbs": None, "text": "Be quick.", "better": None})
    prompt = _teacher_prompt(live.state, LearnConfig(), feedback, kept)
    seen = live.state.text.decode(prompt, special=True)
    assert "Tools: weather(city) price(item) clock(city)" in seen and "Be quick." in seen


def test_feedback_on_a_conversation_with_tools_teaches_the_turn_that_it_is_about(
    client: openai.OpenAI, live: Live
) -> None:
    """The call, or the answer after its result: the tokens of that turn alone, after the history that it had."""
    own = {**GREEDY, "model": "assistant"}
    first = client.chat.completions.create(messages=ASKED, tools=TOOLS, **own)
    (call,) = first.choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "37 coins"}
    second = client.chat.completions.create(messages=[*ASKED, first.choices[0].message, result], tools=TOOLS, **own)
    state, config = live.state, LearnConfig()
    objective = config.build_objective()
    for found, said in ((first, "Wrong tool."), (second, "Too long.")):
        kept = state.store.completion(found.id)
        feedback = FeedbackRow(1, "f", 0.0, 0, found.id, 0, "", said, None, None, "queued", None, "")
        (row,) = lessons.gather(state, config, objective, [feedback]).rows
        assert (row.role, row.prompt, row.tokens) == ("rollout", kept.prompt, kept.tokens)
        read = state.text.decode(row.teacher_prompt or (), special=True)
        assert read.count(said) == 1 and read.count("37 coins") == (found is second)
        assert read.count("<tool_call>") == (found is second) and read.endswith("<|im_start|>assistant\n")


# --- tokens in, tokens out --------------------------------------------------------------------------------------------


def test_generate_gives_the_samplers_own_tokens_and_log_probs(live: Live) -> None:
    policy = live.state.host.policy
    prompt = policy.render(ASKED)
    params = {"max_tokens": 16, "seed": 4, "n": 2, "temperature": 0.8, "logprobs": 1, "top_k": -1}
    found = live.post("/inference/v1/generate", {"model": "base", "token_ids": prompt, "sampling_params": params})
    with live.state.host.turn("learn"):
        want = sample(policy, [prompt], 2, SampleSpec(max_new_tokens=16, seed=4, temperature=0.8))
    for choice, w in zip(found["choices"], want, strict=True):
        assert (tuple(choice["token_ids"]), choice["finish_reason"]) == (w.tokens, w.finish)
        content = choice["logprobs"]["content"]
        assert [c["token"] for c in content] == [f"token_id:{t}" for t in w.tokens]
        assert [c["logprob"] for c in content] == pytest.approx(w.logprobs, abs=1e-4)
    assert live.http.get(f"/v1/chat/completions/{found['request_id']}").status_code == 404  # nothing is stored


def test_generate_stops_at_the_given_tokens(live: Live) -> None:
    policy = live.state.host.policy
    prompt = policy.render([{"role": "user", "content": "Describe the fox."}])
    body: Any = {"model": "base", "token_ids": prompt, "sampling_params": {"max_tokens": 20, "temperature": 0}}
    whole = live.post("/inference/v1/generate", body)["choices"][0]["token_ids"]
    body["sampling_params"]["stop_token_ids"] = [whole[3]]
    cut = live.post("/inference/v1/generate", body)["choices"][0]
    assert cut["token_ids"] == whole[: whole.index(whole[3]) + 1] and cut["finish_reason"] == "stop"
    body["sampling_params"] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    assert len(live.post("/inference/v1/generate", body)["choices"][0]["token_ids"]) == 40


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"min_tokens": 3}, "min_tokens"),
    ],
)
def test_generate_refuses_what_it_would_ignore(live: Live, sampling: dict[str, Any], param: str) -> None:
    body = {"model": "base", "token_ids": [1, 2], "sampling_params": sampling}
    found = live.post("/inference/v1/generate", body, 400)
    assert found["error"]["param"].startswith(f"sampling_params.{param}")


def test_verifiers_train_client_runs_unchanged(live: Live) -> None:
    pytest.importorskip("verifiers.v1")
    from renderers import DefaultRendererConfig
    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.types import SamplingConfig

    config = TrainClientConfig(
        base_url=f"{live.url}/v1",
        renderer=DefaultRendererConfig(tool_parser="qwen3"),
        renderer_model_name=str(places.nano_folder()),
    )

    async def ask() -> Any:
        client = TrainClient(config)
        try:
            body = {"model": "base", "messages": ASKED, "tools": TOOLS}
            return await client.get_response(ChatDialect(), body, SamplingConfig(temperature=0.0, max_tokens=40))
        finally:
            await client.close()

    found = asyncio.run(ask())
    policy = live.state.host.policy
    assert found.tokens.prompt_ids == policy.render(ASKED, tools=TOOLS)
    message = read_message(policy, found.tokens.prompt_ids, found.tokens.completion_ids, TOOLS)
    assert message["tool_calls"][0]["function"]["arguments"] == {"item": "lamp"}
    assert len(found.tokens.completion_logprobs) == len(found.tokens.completion_ids)
    assert max(found.tokens.completion_logprobs) <= 0
