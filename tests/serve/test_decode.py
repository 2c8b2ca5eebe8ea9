"""A completion depends on weights, prompt, seed and draw only, not on the other rows of the batch or when they
joined."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
import torch

import earnest as en
from earnest.engines import LogProbsWanted
from earnest.errors import SamplingError
from earnest.models import Completion, SampleSpec, sample
from earnest.serve.decode import Decoder, Done, QueueFull, Request
from earnest.serve.host import Host
from earnest.serve.settings import ServeSettings

PROMPTS = (
    "Describe the fox.",
    "Tell me about the river.",
    "Sort the letters: d b c a",
    "What do you think of the rain?",
)


@pytest.fixture(scope="module")
def host():
    host = Host(ServeSettings())
    host.start()
    host.wait()
    yield host
    host.close()


def _moved(host: Host, name: str, seed: int, kind: type = en.LoRA) -> en.Adapter:
    adapter = host.attach(name, kind(rank=4), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in adapter.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.15)
    return adapter


def _alone(
    host: Host, adapter: en.Adapter | None, prompt: tuple[int, ...], n: int, spec: SampleSpec
) -> list[Completion]:
    with host.turn("learn", adapter):
        return sample(host.policy, [prompt], n, spec)


def _sample(host: Host, requests: Sequence[Request]) -> list[list[Done]]:
    """The completions of each request, decoded together."""
    submitted = [host.decoder.submit(r) for r in requests]
    return [pending.result() for pending in submitted]


def test_rows_of_many_adapters_equal_each_alone(host: Host) -> None:
    adapters = [None, _moved(host, "one", 1), _moved(host, "two", 2, en.DoRA)]
    asked = [tuple(host.policy.render([{"role": "user", "content": p}])) for p in PROMPTS]
    requests = [
        Request(
            asked[i % 4],
            SampleSpec(max_new_tokens=6 + 5 * (i % 3), seed=i, temperature=(0.0, 0.7, 1.0)[i % 3]),
            adapters[i % 3],
            n=1 + i % 2,
        )
        for i in range(12)
    ]
    together = _sample(host, requests)
    texts = set()
    for request, found in zip(requests, together, strict=True):
        alone = _alone(host, request.adapter, request.prompt, request.n, request.spec)
        for got, want in zip(found, alone, strict=True):
            assert got.tokens == want.tokens
            assert got.finish == want.finish
            assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)
            texts.add(got.tokens)
    assert len(texts) > 8
    # The three policies are really three: the same request differs between them.
    spec = SampleSpec(max_new_tokens=8, seed=3)
    (a,), (b,), (c,) = _sample(host, [Request(asked[0], spec, adapter) for adapter in adapters])
    assert len({a.logprobs, b.logprobs, c.logprobs}) == 3
    for name in ("one", "two"):
        host.detach(name)


def test_joining_late_changes_nothing(host: Host) -> None:
    """A long answer is under way while short ones come and go beside it, with longer and with shorter prompts."""
    long = tuple(host.policy.render([{"role": "user", "content": PROMPTS[0]}]))
    spec = SampleSpec(max_new_tokens=120, seed=7)
    seen: list[int] = []
    joined = threading.Event()

    def on_step(_: int, step) -> None:
        seen.append(step.token)
        if len(seen) == 3:
            joined.set()

    ids = iter(range(100))
    first = next(
        s for s in ids if len(_alone(host, None, long, 1, SampleSpec(max_new_tokens=120, seed=s))[0].tokens) > 20
    )
    spec = SampleSpec(max_new_tokens=120, seed=first)
    pending = host.decoder.submit(Request(long, spec, on_step=on_step))
    joined.wait()
    others = []
    for i, text in enumerate(("Hi.", "Say something about the sea and the moon and the village, please." * 3, "Hi.")):
        prompt = tuple(host.policy.render([{"role": "user", "content": text}]))
        others.append((prompt, host.decoder.submit(Request(prompt, SampleSpec(max_new_tokens=9, seed=i)))))
        time.sleep(0.01)
    (got,) = pending.result()
    (want,) = _alone(host, None, long, 1, spec)
    assert got.tokens == want.tokens == tuple(seen)
    for i, (prompt, other) in enumerate(others):
        (want,) = _alone(host, None, prompt, 1, SampleSpec(max_new_tokens=9, seed=i))
        assert other.result()[0].tokens == want.tokens


def test_trim_cuts_columns_that_are_padding_in_every_row(host: Host) -> None:
    """After a very long prompt has left, the rest goes on without its columns, and as if it had never been there."""
    from earnest.serve.decode import DecodeBatch, PendingRequest

    tiny = tuple(host.policy.render([{"role": "user", "content": PROMPTS[0]}]))
    huge = tuple(host.policy.render([{"role": "user", "content": "Tell me about the fox. " * 30}]))
    ids = iter(range(100))
    seed = next(
        s for s in ids if len(_alone(host, None, tiny, 1, SampleSpec(max_new_tokens=60, seed=s))[0].tokens) > 12
    )
    small = PendingRequest(Request(tiny, SampleSpec(max_new_tokens=60, seed=seed)))
    with host.turn("learn"):
        batch = DecodeBatch(host)
        batch.admit([small, PendingRequest(Request(huge, SampleSpec(max_new_tokens=2)))])
        wide = batch.groups[0].sequences.used
        while len(batch):
            batch.step()
            if len(batch) == 1:
                assert batch.groups[0].sequences.used < wide / 2
    assert small.result()[0].tokens == _alone(host, None, tiny, 1, small.request.spec)[0].tokens


def test_stop_and_alternatives(host: Host) -> None:
    prompt = tuple(host.policy.render([{"role": "user", "content": PROMPTS[0]}]))
    ((done,),) = _sample(host, [Request(prompt, SampleSpec(max_new_tokens=30, seed=1, stop=("e",)), top=5)])
    assert done.finish == "stop" and "e" in host.policy.decode(done.tokens[-1:])
    for token, logprob, top in zip(done.tokens, done.logprobs, done.tops, strict=True):
        assert len(top) == 5 and list(top) == sorted(top, key=lambda x: -x[1])
        assert dict(top).get(token, logprob) == pytest.approx(logprob, abs=1e-5)


def test_log_probs_in_16_bits_are_those_of_the_trainer() -> None:
    """Logits that are rounded to bfloat16 before the softmax would be off by up to 0.09 nats here."""
    host = Host(ServeSettings(dtype="bfloat16"))
    host.start()
    host.wait()
    with torch.no_grad():
        host.policy.head.weight.mul_(3)
    prompts = [tuple(host.policy.render([{"role": "user", "content": text}])) for text in PROMPTS]
    found = _sample(host, [Request(prompt, SampleSpec(max_new_tokens=16, seed=1)) for prompt in prompts])
    adapter = host.attach("fresh", en.LoRA(rank=1), seed=0)
    batch = en.Batch.from_rows(prompts, [done.tokens for (done,) in found])
    with host.turn("learn", adapter):
        scored = en.LocalEngine(host.policy, adapter).score(batch, LogProbsWanted())
    host.close()
    assert isinstance(scored, torch.Tensor)
    sampled = torch.tensor([value for (done,) in found for value in done.logprobs])
    assert float(((scored - sampled).exp() - 1).abs().max()) < 1e-3


def test_cancelled_rows_leave(host: Host) -> None:
    prompt = tuple(host.policy.render([{"role": "user", "content": PROMPTS[0]}]))
    started = threading.Event()
    pending = host.decoder.submit(
        Request(prompt, SampleSpec(max_new_tokens=400, stop=("never",)), n=8, on_step=lambda *_: started.set())
    )
    started.wait()
    pending.cancel()
    done = pending.result()
    assert any(d.finish == "cancelled" and len(d.tokens) < 400 for d in done)


def test_refusals(host: Host) -> None:
    with pytest.raises(SamplingError, match="512 positions"):
        host.decoder.submit(Request((1,) * 600, SampleSpec()))
    with pytest.raises(SamplingError, match="token id 99999"):
        host.decoder.submit(Request((99999,), SampleSpec()))
    decoder = Decoder(host, 4, 2)  # not started: what is submitted waits
    with pytest.raises(SamplingError, match="at most 2 sequences may wait"):
        decoder.submit(Request((1,), SampleSpec(), n=3))
    decoder.submit(Request((1,), SampleSpec(), n=2))
    with pytest.raises(QueueFull, match="2 sequences wait already, at most 2 may"):
        decoder.submit(Request((1,), SampleSpec()))


def test_outside_a_turn_the_model_is_the_base(host: Host) -> None:
    adapter = _moved(host, "loud", 5)
    ids = torch.tensor([[5, 6, 7, 8]])
    with host.turn("learn"), torch.no_grad():
        base = host.policy.hidden(ids)
        with host.only(adapter):
            moved = host.policy.hidden(ids)
        assert torch.equal(host.policy.hidden(ids), base)
    assert not torch.equal(base, moved)
    assert adapter.scale == 0.0
    host.detach("loud")
