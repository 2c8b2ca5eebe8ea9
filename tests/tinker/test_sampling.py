"""Sampling and scoring through the SDK, against float64."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from tinker import RequestFailedError, types

from tests.tinker.conftest import Served, datum

ONE = types.SamplingParams(max_tokens=1)


def _trained(served: Served, rows: list[list[int]]):  # type: ignore[no-untyped-def]
    client = served.training(seed=31)
    client.forward_backward([datum(i, weights=torch.ones(len(i) - 1)) for i in rows], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=2e-3)).result()
    return client, served.reference(client)


def test_prompt_scores_are_the_models(served: Served, rows: list[list[int]]) -> None:
    client, reference = _trained(served, rows)
    sampler = client.save_weights_and_get_sampling_client()
    ids = rows[2]
    prompt = types.ModelInput.from_ints(ids)
    logp = reference.logp(ids).detach()
    own = reference.target_logp(ids).detach()

    found = sampler.compute_logprobs(prompt).result()
    assert found[0] is None
    torch.testing.assert_close(torch.tensor(found[1:], dtype=torch.float64), own, atol=2e-5, rtol=1e-5)

    tail = sampler.compute_logprobs(prompt, prompt_logprobs_last_n=3).result()
    assert tail[:-3] == [None] * (len(ids) - 3) and tail[-3:] == found[-3:]

    K = 5
    cells = torch.full((len(ids) - 1, K), -1)
    cells[2, 0], cells[2, 1], cells[-1, 4] = 7, 9, 11
    for layout in (types.TensorData.from_torch(cells), types.TensorData.from_torch_sparse(cells, pad_value=-1)):
        out = sampler.sample(
            prompt, 1, ONE, include_prompt_logprobs=True, topk_prompt_logprobs=K, target_prompt_logprobs=layout
        ).result()
        assert out.target_prompt_logprobs is not None
        at = out.target_prompt_logprobs.to_torch()
        assert at.shape == cells.shape
        for r, c in ((2, 0), (2, 1), (len(ids) - 2, 4)):
            assert float(at[r, c]) == pytest.approx(float(logp[r, cells[r, c]]), abs=3e-5)
        assert int((at != 0).sum()) == 3
    top = out.topk_prompt_logprobs_np
    assert top is not None and top.token_ids.shape == (len(ids), K)
    assert top.token_ids[0].tolist() == [0] * K and (top.logprobs[0] < -9e4).all()
    values, _ = logp[:-1].topk(K, -1)
    np.testing.assert_allclose(top.logprobs[1:], values.numpy(), atol=3e-5)
    gathered = logp[:-1].gather(-1, torch.from_numpy(top.token_ids[1:].astype(np.int64)))
    np.testing.assert_allclose(top.logprobs[1:], gathered.numpy(), atol=3e-5)


def test_samples_carry_the_trainers_log_probs(served: Served, rows: list[list[int]]) -> None:
    """Sampler and trainer are one program: log-probs of samples equal those of a forward pass on them."""
    client, _ = _trained(served, rows)
    sampler = client.save_weights_and_get_sampling_client()
    prompt = rows[0]
    out = sampler.sample(types.ModelInput.from_ints(prompt), 40, types.SamplingParams(max_tokens=6, seed=4)).result()
    assert len(out.sequences) == 40  # more than the decoder takes at once
    assert len({s.sequence_id for s in out.sequences}) == 40
    for s in out.sequences[:6] + out.sequences[-6:]:
        scored = client.forward([datum([*prompt, *s.tokens])], "cross_entropy").result()
        lp = scored.loss_fn_outputs[0]["logprobs"].to_torch()[-len(s.tokens) :]
        torch.testing.assert_close(torch.tensor(s.logprobs), lp, atol=5e-5, rtol=1e-4)
    firsts = {tuple(s.tokens) for s in out.sequences[:20]}
    assert len(firsts) > 1 and {tuple(s.tokens) for s in out.sequences[32:]} - firsts is not None


def test_a_seed_decides_and_none_is_fresh(served: Served, rows: list[list[int]]) -> None:
    sampler = served.service.create_sampling_client(base_model="earnest/nano")
    prompt = types.ModelInput.from_ints(rows[0])

    def draw(seed: int | None) -> list[list[int]]:
        params = types.SamplingParams(max_tokens=12, seed=seed)
        return [list(s.tokens) for s in sampler.sample(prompt, 4, params).result().sequences]

    assert draw(5) == draw(5) != draw(6)
    assert draw(None) != draw(None)  # 4 × 12 tokens alike by chance: far below 1e-9 at this entropy


def test_what_ends_a_completion(served: Served) -> None:
    policy = served.host.policy
    sampler = served.service.create_sampling_client(base_model="earnest/nano")
    prompt = types.ModelInput.from_ints(policy.render([{"role": "user", "content": "Sort: c a b"}]))
    eos = next(iter(policy.eos_ids))

    def one(**params: object) -> types.SampledSequence:
        given = types.SamplingParams(temperature=0.0, max_tokens=60, **params)  # type: ignore[arg-type]
        return sampler.sample(prompt, 1, given).result().sequences[0]

    plain = one()
    assert plain.stop_reason == "stop" and plain.tokens[-1] == eos
    first = plain.tokens[0]
    assert one(stop=[first]).tokens == [first]
    text = policy.decode(plain.tokens[:1])
    assert one(stop=[text]).tokens == [first] and one(stop=text).stop_reason == "stop"
    assert one(stop=[1023]).tokens == plain.tokens  # an id that does not come; the end of the turn still counts
    endless = one(stop=[])
    assert endless.stop_reason == "length" and len(endless.tokens) == 60
    assert sampler.sample(prompt, 1, types.SamplingParams(temperature=0.0)).result().sequences[0].tokens == plain.tokens


def test_draws_follow_the_model_and_top_k_samples_are_reported(served: Served, rows: list[list[int]]) -> None:
    sampler = served.service.create_sampling_client(base_model="earnest/nano")
    ids = rows[2]
    K = 2000
    out = sampler.sample(
        types.ModelInput.from_ints(ids), 1, types.SamplingParams(max_tokens=4, seed=9, top_k=3),
        topk_sample_logprobs=3, prompt_alt_tokens_k=K,
    ).result()  # fmt: skip
    assert out.prompt_alt_tokens is not None
    tokens, logprobs = out.prompt_alt_tokens.tokens.to_torch(), out.prompt_alt_tokens.logprobs.to_torch()
    assert tokens.shape == (len(ids) - 1, K)
    for row in (0, 5):
        token, count = Counter(tokens[row].tolist()).most_common(1)[0]
        p = math.exp(float(logprobs[row][tokens[row] == token][0]))
        assert abs(count / K - p) < 6 * math.sqrt(p * (1 - p) / K) + 1e-3
    (sequence,) = out.sequences
    top = sequence.topk_logprobs_np
    assert top is not None and top.token_ids.shape == (len(sequence.tokens), 3)
    np.testing.assert_allclose(np.exp(top.logprobs).sum(-1), 1.0, atol=1e-4)  # of what was sampled from: the top 3
    for t, lp, ids_, lps in zip(sequence.tokens, sequence.logprobs, top.token_ids, top.logprobs, strict=True):
        assert lps[ids_.tolist().index(t)] == pytest.approx(lp, abs=1e-4)


def test_named_weights_are_the_ones_that_were_saved(served: Served, rows: list[list[int]]) -> None:
    client, _ = _trained(served, rows)
    path = client.save_weights_for_sampler("first").result().path
    prompt = types.ModelInput.from_ints(rows[2])
    before = client.save_weights_and_get_sampling_client().compute_logprobs(prompt).result()
    state = client.save_state("first").result().path
    client.forward_backward([datum(i, weights=torch.ones(len(i) - 1)) for i in rows], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert served.service.create_sampling_client(model_path=path).compute_logprobs(prompt).result() == before
    assert client.save_weights_and_get_sampling_client().compute_logprobs(prompt).result() != before
    with pytest.warns(FutureWarning, match="load_state"):
        client.load_state(state).result()
    assert client.save_weights_and_get_sampling_client().compute_logprobs(prompt).result() == before, "loaded weights"


@pytest.mark.parametrize(
    ("params", "asked", "said"),
    [
        ({"temperature": -1.0}, {}, "temperature: must be a finite number at least 0, got -1.0"),
        ({"max_tokens": 600}, {}, "512 positions"),
        ({}, {"topk_prompt_logprobs": 5000}, "topk_prompt_logprobs is 5000"),
        ({}, {"target_prompt_logprobs": types.TensorData(data=[1], dtype="int64", shape=[1, 1])}, "shape \\[3, K\\]"),
        ({}, {"prompt_logprobs_last_n": 9, "include_prompt_logprobs": True}, "1 … 3 here"),
    ],
)
def test_requests_out_of_range_are_refused(served: Served, params: dict, asked: dict, said: str) -> None:
    sampler = served.service.create_sampling_client(base_model="earnest/nano")
    given = types.SamplingParams(**{"max_tokens": 2, **params})
    with pytest.raises(RequestFailedError, match=said):
        sampler.sample(types.ModelInput.from_ints([5, 6, 7, 8]), 1, given, **asked).result()
