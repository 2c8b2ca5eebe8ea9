"""Penalties, min-p and JSON mode: the log-probs are those of the distribution that was sampled from."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from earnest.models import SampleSpec
from earnest.serve.decode import DecodedToken, PendingRequest, Request, Shaping, _Row
from tests.serve.conftest import Live

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def _logits(live: Live, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> Tensor:
    """The model's own logits at each token of an answer."""
    policy = live.state.host.policy
    with live.state.host.turn("chat"), torch.no_grad():
        hidden = policy.hidden(torch.tensor([[*prompt, *tokens]]))[0, len(prompt) - 1 : -1]
        return policy.head.logits(hidden).float()


@pytest.mark.parametrize(
    "rules",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7, "temperature": 0.8},
        {"presence_penalty": -1.0, "frequency_penalty": -0.5, "temperature": 0},
        {"min_p": 0.2},
        {"min_p": 0.1, "presence_penalty": 0.9, "temperature": 1.4, "top_k": 20},
    ],
)
def test_log_probs_of_the_processed_distribution(live: Live, rules: dict[str, Any]) -> None:
    answer = live.chat("base", seed=3, max_tokens=24, logprobs=True, top_logprobs=20, **rules)
    kept = live.state.store.completion(answer["id"])
    temperature = rules.get("temperature", 1.0)
    for i, z in enumerate(_logits(live, kept.prompt, kept.tokens)):
        counts = torch.bincount(torch.tensor(kept.tokens[:i], dtype=torch.long), minlength=len(z))
        z = z - rules.get("presence_penalty", 0) * (counts > 0) - rules.get("frequency_penalty", 0) * counts
        z = z / (temperature or 1.0)
        p = z.softmax(-1)
        keep = p >= rules.get("min_p", 0.0) * p.max()
        if k := rules.get("top_k"):
            keep &= z >= z.topk(k).values[-1]
        want = (p * keep / (p * keep).sum()).log()
        token = kept.tokens[i]
        assert kept.logprobs[i] == pytest.approx(float(want[token]), abs=2e-3)
        top = answer["choices"][0]["logprobs"]["content"][i]["top_logprobs"]
        assert len(top) == min(20, int(keep.sum()))
        assert math.fsum(math.exp(t["logprob"]) for t in top) <= 1 + 1e-4
    assert kept.sampling["min_p"] == rules.get("min_p", 0.0)


def test_penalties_by_hand() -> None:
    """z ← z - frequency · c - presence · [c > 0], with the tokens 2, 0, 2, 2 so far."""
    request = Request((1,), SampleSpec(), shaping=Shaping(presence=0.5, frequency=0.25))
    row = _Row(PendingRequest(request), 0, [], [DecodedToken(token, -1.0) for token in (2, 0, 2, 2)])
    torch.testing.assert_close(row.shaped(torch.zeros(4)), torch.tensor([-0.75, 0.0, -1.25, 0.0]))


def test_a_penalty_ends_a_repetition(live: Live) -> None:
    def distinct(**rules: Any) -> int:
        answer = live.chat("base", seed=1, max_tokens=60, temperature=0, return_token_ids=True, **rules)
        tokens = answer["choices"][0]["token_ids"]
        return len(tokens) - len(set(tokens))

    assert distinct(frequency_penalty=2.0, presence_penalty=2.0) < distinct(frequency_penalty=-2.0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_schema_is_followed(live: Live, seed: int, stream: bool) -> None:
    """nano never saw JSON; every finished answer is still valid, whatever else is in its batch."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    if stream:
        body = {"model": "base", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 64, "seed": seed}
        text = live.http.post("/v1/chat/completions", json=body | {"response_format": form, "stream": True}).text
        lines = [json.loads(x[6:]) for x in text.splitlines() if x.startswith("data: {")]
        content = "".join(c["choices"][0]["delta"].get("content") or "" for c in lines)
        finish = lines[-1]["choices"][0]["finish_reason"]
    else:
        choice = live.chat("base", text="Who?", max_tokens=64, seed=seed, response_format=form)["choices"][0]
        content, finish = choice["message"]["content"], choice["finish_reason"]
    assert finish == "stop", content
    found = json.loads(content)
    assert set(found) == {"name", "age"} and len(found["name"]) <= 6 and 0 <= found["age"] <= 99


def test_log_probs_inside_a_grammar(live: Live) -> None:
    """Where the grammar leaves one token its probability is 1."""
    form = {"type": "json_schema", "json_schema": {"schema": {"const": "yes"}}}
    answer = live.chat("base", max_tokens=32, logprobs=True, top_logprobs=3, response_format=form)
    choice = answer["choices"][0]
    assert choice["message"]["content"] == '"yes"' and choice["finish_reason"] == "stop"
    last = choice["logprobs"]["content"][-1]
    assert last["logprob"] == pytest.approx(0.0, abs=1e-6) and len(last["top_logprobs"]) == 1


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema"}, "give json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "strnig"}}}, "cannot be followed"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "(a"}}}, "cannot be followed"),
    ],
)
def test_formats_that_cannot_be_followed(live: Live, form: dict[str, Any], words: str) -> None:
    body = {"model": "base", "messages": [{"role": "user", "content": "Hi"}], "response_format": form}
    refused = live.http.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400 and words in refused.json()["error"]["message"], refused.text


def test_any_object(live: Live) -> None:
    answer = live.chat("base", seed=2, max_tokens=100, temperature=0.5, response_format={"type": "json_object"})
    choice = answer["choices"][0]
    assert choice["message"]["content"].startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
