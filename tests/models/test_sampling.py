"""Laws of sampling: log-probs are the policy's, draws depend on the seed, and the batch does not matter."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from earnest.errors import SamplingError
from earnest.models import Completion, Policy, SampleSpec, sample
from earnest.models.sampling import SampleRow, _inverse_cdf, truncate, uniforms
from tests.models import tiny

PROMPTS = [[5, 6, 7, 8, 9, 10], [7], [8, 9, 30], [11, 12, 13, 14]]


@lru_cache
def shared(kind: str = "llama") -> Policy:
    return tiny.policy(kind)


def teacher_forced(policy: Policy, prompt: list[int], tokens: tuple[int, ...], spec: SampleSpec) -> list[float]:
    """Log-probs from one forward pass of the whole model over the whole sequence: no cache, not earnest's head."""
    with torch.no_grad():
        logits = policy.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].double()
    logp = truncate(logits / (spec.temperature or 1.0), spec.top_k, spec.top_p).log_softmax(-1)
    return logp.gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def close(a: list[Completion], b: list[Completion]) -> None:
    for x, y in zip(a, b, strict=True):
        assert (x.tokens, x.finish) == (y.tokens, y.finish)
        assert x.logprobs == pytest.approx(y.logprobs, abs=1e-4)


# --- the log-probs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "granite", "cohere", "qwen3"])
@pytest.mark.parametrize(
    "spec",
    [
        SampleSpec(max_new_tokens=12),
        SampleSpec(max_new_tokens=12, temperature=0.7),
        SampleSpec(max_new_tokens=12, temperature=1.6, top_k=9),
        SampleSpec(max_new_tokens=12, temperature=0.9, top_p=0.8),
        SampleSpec(max_new_tokens=12, top_k=20, top_p=0.6),
        SampleSpec(max_new_tokens=12, temperature=0),
    ],
    ids=["T1", "T0.7", "top-k", "top-p", "both", "greedy"],
)
def test_logprobs_are_the_teacher_forced_ones(kind: str, spec: SampleSpec) -> None:
    policy = shared(kind)
    out = sample(policy, PROMPTS, 4, spec)
    for c in out:
        assert len(c.tokens) == len(c.logprobs)
        want = teacher_forced(policy, PROMPTS[c.prompt_index], c.tokens, spec)
        assert c.logprobs == pytest.approx(want, abs=1e-4)
    assert any(abs(x) > 0.1 for c in out for x in c.logprobs)


def test_an_adapter_as_a_patched_forward_takes_effect() -> None:
    policy = tiny.policy()
    before = sample(policy, PROMPTS, 2, SampleSpec())
    torch.manual_seed(0)
    for name, module in policy.model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(("q_proj", "v_proj", "lm_head")):
            delta = torch.randn_like(module.weight) * 0.1

            def forward(x: Any, base: Any = module.forward, delta: Any = delta) -> Any:
                return base(x) + x @ delta.T

            module.forward = forward  # type: ignore[method-assign]
    after = sample(policy, PROMPTS, 2, SampleSpec())
    assert [c.tokens for c in after] != [c.tokens for c in before]
    for c in after:
        want = teacher_forced(policy, PROMPTS[c.prompt_index], c.tokens, SampleSpec())
        assert c.logprobs == pytest.approx(want, abs=1e-4)


def test_sixteen_bits() -> None:
    policy = Policy.of(tiny.model().to(torch.bfloat16), tiny.tokenizer())
    for c in sample(policy, PROMPTS, 3, SampleSpec(max_new_tokens=8)):
        want = teacher_forced(policy, PROMPTS[c.prompt_index], c.tokens, SampleSpec())
        # The reference rounds its logits to bfloat16, which has 8 bits; logits here are up to 5.
        assert c.logprobs == pytest.approx(want, abs=0.25)


# --- the draws --------------------------------------------------------------------------------------------------------


def reference_sampler(policy: Policy, prompt: list[int], draw: int, spec: SampleSpec) -> tuple[int, ...]:
    """One row, one token at a time, the whole model without a cache, the inverse CDF by a Python loop in float64."""
    numbers = uniforms([SampleRow(0, 0, tuple(prompt), draw)], spec.seed, spec.max_new_tokens)[0]
    tokens: list[int] = []
    for u in numbers:
        with torch.no_grad():
            logits = policy.model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].double() / spec.temperature
        total, chosen = 0.0, -1
        for v, p in enumerate(logits.softmax(-1).tolist()):
            total += p
            if total > u:
                chosen = v
                break
        tokens.append(chosen)
        if chosen in policy.eos_ids:
            break
    return tuple(tokens)


def test_tokens_are_the_reference_samplers() -> None:
    policy, spec = shared(), SampleSpec(max_new_tokens=10, temperature=0.8, seed=11)
    out = sample(policy, PROMPTS, 3, spec)
    for c in out:
        assert c.tokens == reference_sampler(policy, PROMPTS[c.prompt_index], c.sample_index, spec)
    assert {c.finish for c in out} == {"stop", "length"}


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_frequencies_of_the_first_token(temperature: float) -> None:
    """χ² of 6,000 first tokens against softmax(z/T). A correct sampler fails at one seed in a million."""
    policy, n = shared(), 6000
    out = sample(policy, [[8, 9]], n, SampleSpec(max_new_tokens=1, temperature=temperature, seed=5), max_rows=2000)
    with torch.no_grad():
        p = (policy.model(torch.tensor([[8, 9]])).logits[0, -1].double() / temperature).softmax(-1)
    seen = torch.bincount(torch.tensor([c.tokens[0] for c in out]), minlength=tiny.V).double()
    common = n * p >= 5
    seen = torch.cat([seen[common], seen[~common].sum()[None]])
    want = torch.cat([n * p[common], n * p[~common].sum()[None]])
    chi2 = ((seen - want) ** 2 / want.clamp_min(1e-9)).sum()
    odds = float(torch.special.gammaincc(torch.tensor((len(want) - 1) / 2.0).double(), chi2 / 2))
    assert odds > 1e-6, (float(chi2), len(want))
    assert len(want) > 8  # not vacuous: many tokens were possible


def test_same_seed_same_completions_and_another_seed_others() -> None:
    policy = shared()
    a, b = (sample(policy, PROMPTS, 3, SampleSpec(seed=4)) for _ in range(2))
    assert a == b
    assert [c.tokens for c in a] != [c.tokens for c in sample(policy, PROMPTS, 3, SampleSpec(seed=5))]


def test_samples_of_one_prompt_differ() -> None:
    """A known bug of samplers: one first token for all samples of a prompt. The probability by chance is below 1e-9."""
    first = {c.tokens[0] for c in sample(shared(), [[8, 9]], 16, SampleSpec())}
    assert len(first) > 2


def test_numbers_are_uniform_and_independent_of_the_number_of_steps() -> None:
    rows = [SampleRow(0, 0, (5, 6), d) for d in range(200)] + [SampleRow(0, 0, (6, 5), d) for d in range(200)]
    u = uniforms(rows, 0, 50)
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 5 * math.sqrt(1 / 12 / u.size)  # 5 sigma
    assert len({float(x) for x in u.ravel()}) == u.size
    assert (uniforms(rows, 0, 7) == u[:, :7]).all()
    assert (uniforms(rows[5:9], 0, 50) == u[5:9]).all()
    assert (uniforms(rows, 1, 50) != u).all()


# --- the batch does not matter ----------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(
    prompts=st.lists(
        st.lists(st.integers(2, tiny.V - 1), min_size=1, max_size=9), min_size=1, max_size=5, unique_by=tuple
    ),
    n=st.integers(1, 3),
    max_rows=st.integers(1, 9),
    compact=st.sampled_from([0.0, 0.5, 1.0]),
    new=st.integers(1, 9),
)
def test_completions_do_not_depend_on_the_batch(
    prompts: list[list[int]], n: int, max_rows: int, compact: float, new: int
) -> None:
    spec = SampleSpec(max_new_tokens=new, seed=1)
    together = sample(shared(), prompts, n, spec, max_rows=max_rows, compact_below=compact)
    assert [(c.prompt_index, c.sample_index) for c in together] == [
        (i, j) for i in range(len(prompts)) for j in range(n)
    ]
    for i, prompt in enumerate(prompts):
        alone = sample(shared(), [prompt], n, spec)
        close([Completion(0, *_rest(c)) for c in together if c.prompt_index == i], alone)


def _rest(c: Completion) -> Any:
    return c.sample_index, c.tokens, c.logprobs, c.finish


def test_a_repeated_prompt_is_drawn_anew() -> None:
    """[p, p] with n=2 are the four draws of [p] with n=4, not twice the same two."""
    twice = sample(shared(), [[8, 9], [8, 9]], 2, SampleSpec())
    once = sample(shared(), [[8, 9]], 4, SampleSpec())
    assert [c.tokens for c in twice] == [c.tokens for c in once]
    assert len({c.tokens for c in twice}) == 4


@pytest.mark.parametrize("compact", [0.0, 0.3, 0.75, 1.0])
def test_dropping_finished_rows_changes_nothing(compact: float) -> None:
    policy, spec = shared(), SampleSpec(max_new_tokens=30)
    whole = sample(policy, PROMPTS, 6, spec, compact_below=0.0)
    assert sum(c.finish == "stop" for c in whole) > 6
    close(whole, sample(policy, PROMPTS, 6, spec, compact_below=compact))


def test_greedy_is_generates_greedy() -> None:
    """An independent implementation, left-padded by itself."""
    for kind in ("llama", "gpt2", "qwen2", "gemma3"):
        policy = shared(kind)
        out = sample(policy, PROMPTS, 1, SampleSpec(max_new_tokens=10, temperature=0))
        for prompt, c in zip(PROMPTS, out, strict=True):
            ids = torch.tensor([prompt])
            want = policy.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10)
            assert list(c.tokens) == want[0, len(prompt) :].tolist()


# --- ends -------------------------------------------------------------------------------------------------------------


def biased(token: int, pad: str | None = "<pad>") -> Policy:
    """A policy that generates only ``token``."""
    policy = tiny.policy("phi_bias", pad=pad)
    with torch.no_grad():
        policy.model.lm_head.bias[token] += 100
    return policy


def test_a_completion_may_be_its_eos_alone() -> None:
    for c in sample(biased(1), PROMPTS, 2, SampleSpec()):
        assert (c.tokens, c.finish) == ((1,), "stop")
        assert c.logprobs == pytest.approx([0.0], abs=1e-5)


def test_pad_equal_to_eos() -> None:
    """The pad fills short prompts, eos ends turns; both work if they are the same id."""
    policy = tiny.policy(pad="<eos>")
    assert policy.pad_id in policy.eos_ids
    close(sample(policy, PROMPTS, 4, SampleSpec()), sample(tiny.policy(), PROMPTS, 4, SampleSpec()))
    assert all(c.tokens == (1,) for c in sample(biased(1, pad="<eos>"), PROMPTS, 1, SampleSpec()))
    prompt = [5, 1, 6, 1, 1]  # ends of turns inside a prompt end nothing, and they are seen
    (c,) = sample(policy, [prompt, [7] * 9], 1, SampleSpec(max_new_tokens=6))[:1]
    assert c.logprobs == pytest.approx(teacher_forced(policy, prompt, c.tokens, SampleSpec()), abs=1e-4)


def test_sampled_pads_do_not_end_a_turn() -> None:
    for c in sample(biased(0), PROMPTS, 1, SampleSpec(max_new_tokens=5)):
        assert (c.tokens, c.finish) == ((0,) * 5, "length")


def test_one_token() -> None:
    out = sample(shared(), PROMPTS, 8, SampleSpec(max_new_tokens=1))
    assert all(len(c.tokens) == 1 for c in out)
    assert all(c.finish == ("stop" if c.tokens[0] == 1 else "length") for c in out)


def test_stop_strings() -> None:
    policy, free = shared(), SampleSpec(max_new_tokens=30, seed=2)
    texts = [policy.tokenizer.decode(c.tokens) for c in sample(policy, PROMPTS, 4, free)]
    stop = next(t for t in texts if len(t) > 6)[2:4]  # two characters, so the string is completed by a second token
    stopped = 0
    for text, c in zip(
        texts, sample(policy, PROMPTS, 4, SampleSpec(max_new_tokens=30, seed=2, stop=(stop,))), strict=True
    ):
        got = policy.tokenizer.decode(c.tokens)
        if stop in text:
            assert got == text[: text.index(stop) + len(stop)]
            assert c.finish == "stop"
            stopped += 1
        else:
            assert got == text
    assert stopped


# --- truncation -------------------------------------------------------------------------------------------------------


def test_truncate_by_hand() -> None:
    """p = .4 .3 .2 .1: top-p .5 keeps two (.4 is not enough), top-k 3 keeps three; ties at the edge stay."""
    z = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    kept = lambda k, p: truncate(z, k, p).isfinite()[0].tolist()  # noqa: E731
    assert kept(0, 0.5) == [True, True, False, False]
    assert kept(0, 0.39) == [True, False, False, False]
    assert kept(3, 1.0) == [True, True, True, False]
    assert kept(3, 0.7) == [True, True, False, False]  # .4 + .3 of .9 is enough
    assert kept(0, 1.0) == [True] * 4
    assert truncate(torch.tensor([[1.0, 2.0, 1.0, 0.0]]), 2, 1.0).isfinite()[0].tolist() == [True, True, True, False]


@given(st.integers(0, 10_000), st.integers(0, 12), st.floats(0.05, 1.0))
def test_truncate_is_transformers(seed: int, top_k: int, top_p: float) -> None:
    """An independent implementation, where no cumulative mass is within rounding of the edge."""
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    z = torch.randn(3, 10, generator=torch.Generator().manual_seed(seed)).double() * 2
    want = TopKLogitsWarper(top_k)(None, z) if top_k else z
    mass = want.softmax(-1).sort(descending=True).values.cumsum(-1)
    if (mass - top_p).abs().min() < 1e-9:
        return
    want = TopPLogitsWarper(top_p)(None, want) if top_p < 1 else want
    assert torch.equal(truncate(z, top_k, top_p), want)


# --- what it leaves alone, and what it refuses ------------------------------------------------------------------------


def test_dropout_is_off_while_sampling_and_modes_come_back() -> None:
    policy = tiny.policy("gpt2")
    want = sample(policy, PROMPTS, 2, SampleSpec())
    policy.model.train()
    policy.model.transformer.h[0].eval()  # a mixture
    modes = [m.training for m in policy.model.modules()]
    assert any(modes)
    assert sample(policy, PROMPTS, 2, SampleSpec()) == want
    assert [m.training for m in policy.model.modules()] == modes


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3"])
def test_training_works_after_sampling(kind: str) -> None:
    """Nothing that sampling left in the model (a cached table, say) is unfit for a backward pass."""
    policy = tiny.policy(kind)
    sample(policy, PROMPTS, 2, SampleSpec(max_new_tokens=3))
    weight = next(p for n, p in policy.model.named_parameters() if p.ndim == 2 and ("q_proj" in n or "c_attn" in n))
    weight.requires_grad_(True)
    policy.hidden(torch.tensor([PROMPTS[0]])).square().sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().max() > 0


def test_the_global_generator_is_not_touched() -> None:
    policy = shared()  # loading a model draws numbers
    torch.manual_seed(7)
    want = torch.rand(3)
    torch.manual_seed(7)
    sample(policy, PROMPTS, 2, SampleSpec())
    assert torch.equal(torch.rand(3), want)


def test_progress_counts_up_to_all() -> None:
    seen: list[tuple[int, int]] = []
    sample(shared(), PROMPTS, 4, SampleSpec(), lambda done, total: seen.append((done, total)), max_rows=5)
    assert seen[-1] == (16, 16)
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)
    assert len(seen) > 4


def test_logits_that_are_not_finite_are_an_error() -> None:
    policy = tiny.policy()
    with torch.no_grad():
        policy.model.model.layers[1].mlp.down_proj.weight[0, 0] = math.nan
    policy.__dict__["cache_kind"] = "buffered"
    for temperature in (0.0, 1.0):
        with pytest.raises(SamplingError, match="not finite"):
            sample(policy, PROMPTS, 1, SampleSpec(temperature=temperature))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: must be a whole number at least 1, got 0"),
        ({"temperature": -0.1}, "temperature: must be a finite number at least 0, got -0.1"),
        ({"temperature": math.nan}, "temperature: must be .*, got nan"),
        ({"top_p": 0.0}, "top_p: must be a finite number above 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, "top_p: must be .*, got 1.1"),
        ({"top_k": -1}, "top_k: must be a whole number at least 0, got -1"),
        ({"stop": ("",)}, "stop: must be a list of texts that are not empty, got"),
        ({"stop": "abc"}, "stop: must be .*, got 'abc'"),
    ],
)
def test_specs_out_of_range(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SamplingError, match=words):
        SampleSpec(**fields)


@pytest.mark.parametrize(
    ("prompts", "n", "new", "words"),
    [
        ([], 1, 4, "no prompts"),
        ([[5], []], 1, 4, "Prompt 1 has no tokens"),
        ([[5, 99]], 1, 4, "token id 99, .* has 0 to"),
        ([[-1]], 1, 4, "token id -1"),
        ([[5]], 0, 4, "n is 0"),
        ([[5] * 100], 1, 30, "100 tokens; with max_new_tokens=30 that is more than the 128"),
    ],
)
def test_requests_out_of_range(prompts: list[list[int]], n: int, new: int, words: str) -> None:
    with pytest.raises(SamplingError, match=words):
        sample(shared(), prompts, n, SampleSpec(max_new_tokens=new))


def test_the_last_position_can_be_used() -> None:
    (c,) = sample(biased(5), [[5] * 100], 1, SampleSpec(max_new_tokens=29))
    assert len(c.tokens) == 29


@pytest.mark.parametrize("vocabulary", [8192, 8193, 20_011])
def test_a_large_vocabulary_is_searched_by_blocks(vocabulary: int) -> None:
    g = torch.Generator().manual_seed(0)
    p = torch.rand(3, vocabulary, generator=g).pow(8).softmax(-1)
    p[1, : vocabulary - 1] = 0
    u = torch.tensor([[0.0], [0.3], [0.999_999]], dtype=torch.float64)
    wanted = torch.searchsorted(p.double().cumsum(-1), u * p.double().sum(-1, keepdim=True), right=True)
    assert torch.equal(_inverse_cdf(p, u), wanted.clamp(max=vocabulary - 1))
