"""The OpenAI wire, through the official client."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace

import openai
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from earnest.models import SampleSpec, sample
from earnest.serve.completing import CompletionWork, keep_rest, wait
from earnest.serve.decode import Done, PendingRequest
from earnest.serve.decode import Request as Wanted
from earnest.serve.errors import NotFound
from earnest.serve.keys import Caller
from earnest.serve.leases import Lease
from earnest.serve.openai import chat_logprobs
from earnest.serve.text import Text
from earnest.serve.wire import TextRequest
from tests.serve.conftest import Live

ASKED = [{"role": "user", "content": "Tell me about the river."}]


@pytest.fixture(scope="module")
def client(live: Live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def _expected(live: Live, n: int = 1, **spec):
    """What earnest's own sampler gives for the same prompt, seed and settings."""
    policy = live.state.host.policy
    with live.state.host.turn("learn"):
        return sample(policy, [policy.render(ASKED)], n, SampleSpec(**spec))


def test_a_chat(client: openai.OpenAI, live: Live) -> None:
    found = client.chat.completions.create(
        model="base", messages=ASKED, seed=5, n=3, max_tokens=20, temperature=0.8, logprobs=True, top_logprobs=3
    )
    want = _expected(live, 3, seed=5, max_new_tokens=20, temperature=0.8)
    assert [c.message.content for c in found.choices] == [live.state.host.policy.decode(w.tokens) for w in want]
    assert [c.finish_reason for c in found.choices] == [w.finish for w in want]
    for choice, w in zip(found.choices, want, strict=True):
        assert [t.logprob for t in choice.logprobs.content] == pytest.approx(list(w.logprobs), abs=1e-4)
        for token in choice.logprobs.content:
            assert len(token.top_logprobs) == 3
            values = [t.logprob for t in token.top_logprobs]
            assert values == sorted(values, reverse=True)
            own = [t.logprob for t in token.top_logprobs if t.token == token.token]
            assert own == [] or own[0] == pytest.approx(token.logprob, abs=1e-5)
    assert found.usage.completion_tokens == sum(len(w.tokens) for w in want)
    assert found.usage.prompt_tokens == len(live.state.host.policy.render(ASKED))
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    assert found.model_extra["adapter_version"] == 0 and found.id.startswith("chatcmpl-")


def test_the_answer_is_kept_exactly(client: openai.OpenAI, live: Live) -> None:
    found = client.chat.completions.create(model="assistant", messages=ASKED, seed=6, n=2, max_tokens=9)
    want = _expected(live, 2, seed=6, max_new_tokens=9)
    for index in range(2):
        kept = live.state.store.completion(found.id, index)
        assert kept.tokens == want[index].tokens
        assert kept.logprobs == pytest.approx(want[index].logprobs, abs=1e-4)
        assert kept.prompt == tuple(live.state.host.policy.render(ASKED))
        assert kept.text == found.choices[index].message.content and list(kept.messages) == ASKED
        assert (kept.model, kept.version, kept.temperature) == ("assistant", 0, 1.0)
    shown = live.get(f"/v1/chat/completions/{found.id}", choice=1)
    assert tuple(shown["tokens"]) == want[1].tokens and shown["adapter_version"] == 0


def test_streaming_gives_the_same_answer(client: openai.OpenAI, live: Live) -> None:
    more = {"seed": 9, "n": 2, "max_tokens": 24, "stop": ["often", "y."], "logprobs": True}
    whole = client.chat.completions.create(model="base", messages=ASKED, **more)
    texts, finishes, logprobs, usage = ["", ""], [None, None], [[], []], None
    roles: dict[int, str] = {}
    for chunk in client.chat.completions.create(
        model="base", messages=ASKED, stream=True, stream_options={"include_usage": True}, **more
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            roles[choice.index] = choice.delta.role or roles[choice.index]
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
            logprobs[choice.index] += [t.logprob for t in choice.logprobs.content] if choice.logprobs else []
    assert texts == [c.message.content for c in whole.choices]
    assert finishes == [c.finish_reason for c in whole.choices] and roles == {0: "assistant", 1: "assistant"}
    for got, choice in zip(logprobs, whole.choices, strict=True):
        assert got == pytest.approx([t.logprob for t in choice.logprobs.content], abs=1e-4)
    assert usage == whole.usage
    assert live.state.store.completion(chunk.id, 1).text == texts[1]


def test_stop_is_not_in_the_text(client: openai.OpenAI, live: Live) -> None:
    plain = client.chat.completions.create(model="base", messages=ASKED, seed=3, max_tokens=30)
    text = plain.choices[0].message.content
    word = text.split()[2]
    cut = client.chat.completions.create(model="base", messages=ASKED, seed=3, max_tokens=30, stop=word)
    assert cut.choices[0].message.content == text[: text.index(word)]
    assert cut.choices[0].finish_reason == "stop"
    assert word in live.state.text.decode(live.state.store.completion(cut.id).tokens)


def test_greedy_decoding_and_seeds_are_deterministic(client: openai.OpenAI) -> None:
    a, b = (client.chat.completions.create(model="base", messages=ASKED, temperature=0, max_tokens=9) for _ in range(2))
    assert a.choices[0].message.content == b.choices[0].message.content
    unseeded = {
        client.chat.completions.create(model="base", messages=ASKED, max_tokens=24).choices[0].message.content
        for _ in range(6)
    }
    assert len(unseeded) > 1


def test_plain_completions(client: openai.OpenAI, live: Live) -> None:
    ids = live.state.host.policy.encode("The fox is")
    a = client.completions.create(model="base", prompt=["The fox is", "The owl"], seed=1, max_tokens=6, logprobs=2)
    b = client.completions.create(model="base", prompt=ids, seed=1, max_tokens=6)
    assert len(a.choices) == 2 and a.choices[0].text == b.choices[0].text
    assert len(a.choices[0].logprobs.token_logprobs) == a.usage.completion_tokens - len(
        a.choices[1].logprobs.token_logprobs
    )
    streamed = client.completions.create(model="base", prompt=ids, seed=1, max_tokens=6, stream=True)
    assert "".join(c.choices[0].text for c in streamed if c.choices) == b.choices[0].text


def test_streamed_log_probs_are_those_of_the_whole(client: openai.OpenAI) -> None:
    """Of two prompts with two answers each: tokens, values and where each token begins in its own text."""
    asked = {"model": "base", "prompt": ["The fox is", "The owl"], "seed": 1, "n": 2, "max_tokens": 6, "logprobs": 2}
    whole = client.completions.create(**asked)
    found: dict[int, dict[str, list]] = {}
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                found.setdefault(choice.index, {}).setdefault(name, []).extend(values)
    assert sorted(found) == [0, 1, 2, 3]
    for choice in whole.choices:
        got, want = found[choice.index], choice.logprobs
        assert (got["tokens"], got["text_offset"]) == (want.tokens, want.text_offset)
        assert got["token_logprobs"] == pytest.approx(want.token_logprobs, abs=1e-4)
        assert len(set(want.text_offset)) == len(want.tokens) > 1
        for token, offset in zip(want.tokens, want.text_offset, strict=True):
            assert choice.text[offset:].startswith(token) or token.startswith("<|")


def test_bytes_are_those_of_the_text(live: Live) -> None:
    """Also where a token is a part of a character: the bytes of all tokens together are the text's."""
    said = "Café, naïve: 🦊 — ß.\n"
    text = live.state.text
    ids = text.encode(said, special=False)
    end = next(iter(live.state.host.policy.eos_ids))
    assert any("\ufffd" in text.decode([t], special=True) for t in ids), "no character here has two tokens"
    found = chat_logprobs(text, Done((*ids, end), (0.0,) * (len(ids) + 1), "stop"))["content"]
    assert bytes(b for t in found[:-1] for b in t["bytes"]).decode() == said
    assert bytes(found[-1]["bytes"]).decode() == found[-1]["token"] == text.decode([end], special=True)
    # A vocabulary that spells unknown characters as <0xC3> <0xA9>, and one that knows nothing of bytes.
    names = {"<unk>": 0, "a": 1, **{f"<0x{b:02X}>": 2 + b for b in range(256)}, "\ufffd": 258}
    for decoder, wanted in ((decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]), [195]), (None, None)):
        small = Tokenizer(models.BPE(names, [], unk_token="<unk>", byte_fallback=True))
        if decoder is not None:
            small.decoder = decoder
        own = Text(SimpleNamespace(tokenizer=PreTrainedTokenizerFast(tokenizer_object=small)))
        assert own.bytes_of(1) == [97] and own.bytes_of(258) is None
        assert own.bytes_of(2 + 0xC3) == (wanted or list(b"<0xC3>"))


def test_an_answer_stays_with_its_prompt(live: Live) -> None:
    """A client disconnected after one of its prompts had failed: the other answers are stored under their own
    numbers."""
    body = TextRequest(model="base", prompt=["The fox is", "The owl", "The sea"], n=2, max_tokens=2)
    live.state.wait()
    work = CompletionWork(live.state, body, Caller(), "text", [], 2, None)
    work.lease = Lease(None, 0, None)
    work.shape()
    work.prompts = [live.state.text.encode(p) for p in body.prompts()]
    submitted = [PendingRequest(Wanted(p, SampleSpec(max_new_tokens=2), n=2)) for p in work.prompts]
    submitted[1].fail(RuntimeError("diverged"))
    for place in (0, 2):
        for index in range(2):
            submitted[place].finish(index, Done((10 * place + index,), (-1.0,), "cancelled"))
    asyncio.run(keep_rest(work, submitted, ExitStack()))
    for choice, (place, token) in {0: (0, 0), 1: (0, 1), 4: (2, 20), 5: (2, 21)}.items():
        kept = live.state.store.completion(work.id, choice)
        assert (kept.prompt, kept.tokens) == (work.prompts[place], (token,))
    for choice in (2, 3):
        with pytest.raises(NotFound):
            live.state.store.completion(work.id, choice)


def test_the_request_of_a_client_that_disconnects_is_cancelled() -> None:
    pending = PendingRequest(Wanted([1], SampleSpec(max_new_tokens=2)))
    left = Done((), (), "cancelled")

    async def is_disconnected() -> bool:
        pending.finish(0, left)  # as the decoder does at the next token
        return True

    client = SimpleNamespace(is_disconnected=is_disconnected)
    answers = asyncio.run(asyncio.wait_for(wait([pending], client), 30))
    assert pending.cancelled and answers == [[left]]


def test_echo_scores_the_prompt(client: openai.OpenAI, live: Live) -> None:
    policy = live.state.host.policy
    ids = policy.encode("The fox is quick and shy.")
    found = client.completions.create(model="base", prompt=ids, max_tokens=0, echo=True, logprobs=0)
    with live.state.host.turn("learn"), torch.no_grad():
        logits = policy.model(torch.tensor([ids])).logits.double().log_softmax(-1)
    want = [float(logits[0, i, t]) for i, t in enumerate(ids[1:])]
    assert found.choices[0].text == policy.decode(ids)
    assert found.choices[0].logprobs.token_logprobs[0] is None
    assert found.choices[0].logprobs.token_logprobs[1:] == pytest.approx(want, abs=1e-4)


def test_score(live: Live) -> None:
    body = {"model": "base", "messages": ASKED, "completion": "The river is quiet."}
    found = live.post("/v1/score", body)
    policy = live.state.host.policy
    prompt = policy.render(ASKED)
    whole = policy.render([*ASKED, {"role": "assistant", "content": body["completion"]}], add_generation_prompt=False)
    answer = whole[len(prompt) : len(prompt) + found["completion_tokens"]]
    with live.state.host.turn("learn"), torch.no_grad():
        logits = policy.model(torch.tensor([prompt + answer])).logits.double().log_softmax(-1)
    want = [float(logits[0, len(prompt) - 1 + i, t]) for i, t in enumerate(answer)]
    assert found["logprobs"] == pytest.approx(want, abs=1e-4)
    assert found["token_ids"][-1] in policy.eos_ids and found["logprob_sum"] == pytest.approx(sum(want), abs=1e-3)


def test_models(client: openai.OpenAI) -> None:
    names = [m.id for m in client.models.list()]
    assert names[:2] == ["base", "assistant"]
    assert client.models.retrieve("assistant").id == "assistant"


def test_token_ids_on_request(live: Live) -> None:
    found = live.chat(return_token_ids=True, seed=2)
    kept = live.state.store.completion(found["id"])
    assert tuple(found["choices"][0]["token_ids"]) == kept.tokens
    assert tuple(found["prompt_token_ids"]) == kept.prompt


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "there is no adapter 'nobody'"),
        ({"model": "asistant"}, openai.NotFoundError, "there is no adapter 'asistant'; did you mean 'assistant'?"),
        ({"model": "assistant@77"}, openai.NotFoundError, "has no version 77"),
        ({"model": "assistant@x"}, openai.NotFoundError, "names no version"),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"n": 0}, openai.BadRequestError, "n:"),
        ({"max_tokens": 5000}, openai.BadRequestError, "has room for 512"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "user", "content": "x " * 2000}]}, openai.BadRequestError, "has room for 512"),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError, "tools.0.function"),
        ({"logit_bias": {"5": 1}}, openai.BadRequestError, "logit_bias is not supported"),
        ({"frequency_penalty": 5}, openai.BadRequestError, "frequency_penalty"),
        ({"top_logprobs": 2}, openai.BadRequestError, "needs logprobs"),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "temprature: there is no such field"),
    ],
)
def test_refusals_are_openais(client: openai.OpenAI, body, error, words: str) -> None:
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": "base", "messages": ASKED, **body})
    shown = caught.value.body
    assert set(shown) == {"message", "type", "param", "code"} and words in shown["message"]


def test_fields_with_neutral_values_are_accepted(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model="base",
        messages=ASKED,
        max_tokens=2,
        frequency_penalty=0,
        tools=[],
        store=True,
        user="u",
        metadata={"a": "b"},
    )
    assert found.choices[0].finish_reason in ("length", "stop")


def test_other_errors_have_the_same_shape(live: Live) -> None:
    for method, path in (("GET", "/v1/nothing"), ("PUT", "/v1/chat/completions"), ("GET", "/v1/chat/completions/zz")):
        found = live.http.request(method, path)
        assert found.status_code in (404, 405) and set(found.json()["error"]) == {"message", "type", "param", "code"}
    assert live.http.post("/v1/chat/completions", content=b"{not json").status_code == 400
