"""The filter: numbers by hand, laws over any text, and known good and broken answers on nano."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import earnest as en
from earnest.steering import Filter, SteeringError, read, separation
from earnest.steering.filter import SteeredSample, tail_perplexity
from earnest.steering.text import NARRATION, REFUSAL, char_repetition, says, word_repetition


def made(text: str, tail: float = 3.0) -> SteeredSample:
    return SteeredSample((1,), (2,), text, tail)


def test_word_repetition_by_hand() -> None:
    """ "a b c a b c": the trigrams abc bca cab abc, 3 distinct of 4."""
    assert word_repetition("a b c a b c") == pytest.approx(1 / 4)
    assert word_repetition("go go go go go") == pytest.approx(2 / 3)
    assert word_repetition("The fox is quick.") == 0 and word_repetition("two words") == 0 and word_repetition("") == 0


def test_char_repetition_by_hand() -> None:
    assert char_repetition("aaaa") == 1.0
    assert char_repetition("xyxyxy") == 1.0 and char_repetition("xyxy") == 0.0
    assert char_repetition("well!!!!!!") == pytest.approx(6 / 10)
    assert char_repetition("The fox is quick.") == 0 and char_repetition("") == 0


@given(st.text(max_size=60))
def test_repetition_is_a_share_and_repeating_a_text_never_lowers_it(text: str) -> None:
    for measure in (word_repetition, char_repetition):
        assert 0 <= measure(text) <= 1
    if text:
        assert char_repetition(text * 4) == 1.0 or len(text) > 12
    if len(text.split()) >= 1 and any(c.isalnum() for c in text):
        assert word_repetition((text + " ") * 8) > 0.5


def test_phrases_are_whole_words_in_any_spelling() -> None:
    assert says("I’m  Sorry, no.", REFUSAL) == "i'm sorry" and says("as an ai, I", REFUSAL) == "as an ai"
    assert says("as an aim it is good", REFUSAL) is None
    assert says("Here is a poem", NARRATION) == "here is a" and says("There is a fox", NARRATION) is None
    assert all(p == p.lower() for p in (*NARRATION, *REFUSAL))


def test_the_tail_is_the_last_half() -> None:
    """Log-probs 0 0 0 0 −1 −1 −1 −1: the whole has perplexity e^½, the tail e."""
    assert tail_perplexity(torch.tensor([0.0] * 4 + [-1.0] * 4)) == pytest.approx(math.e)
    assert tail_perplexity(torch.tensor([-1.0] * 4 + [0.0] * 4)) == pytest.approx(1.0)
    assert tail_perplexity(torch.tensor([0.0, -3.0, -3.0])) == pytest.approx(math.exp(2)), "a short one is all tail"
    assert tail_perplexity(torch.tensor([-2.0])) == pytest.approx(math.exp(2))


def test_each_limit_refuses_its_own_kind_and_only_that() -> None:
    limits = Filter(tail_perplexity=10)
    cases = {
        "The fox is quick and clever.": [],
        " ": ["empty"],
        "the cat sat on the cat sat on the cat sat on the": ["word repetition"],
        "nice!!!!!!!!!!!!": ["character repetition"],
        "Here is a line. The fox is quick.": ["narration"],
        "I am sorry, no fox today.": ["refusal"],
    }
    for text, reasons in cases.items():
        found = limits.reasons(made(text))
        assert (found == reasons) if text != "nice!!!!!!!!!!!!" else (reasons[0] in found), (text, found)
    assert limits.reasons(made("The fox is quick.", 10.5)) == ["tail perplexity"]
    assert limits.reasons(made("The fox is quick.", math.nan)) == ["tail perplexity"], "NaN is not good"
    assert limits.counts([made("I am sorry.", 99), made(" ", 99)]) == {"tail perplexity": 2, "refusal": 1, "empty": 1}
    assert [s.text for s in limits.survivors([made("A fox."), made(" ")])] == ["A fox."]


def test_limits_are_checked_and_never_missing() -> None:
    with pytest.raises(SteeringError, match="calibrated"):
        Filter().reasons(made("x"))
    for wrong in ({"tail_perplexity": 0.5}, {"word_repetition": 2.0}, {"char_repetition": -0.1}):
        with pytest.raises(SteeringError, match=next(iter(wrong))):
            Filter(**wrong)
    with pytest.raises(SteeringError, match="no good sample"):
        Filter().calibrated([])
    good = [made("x", float(p)) for p in range(1, 102)]
    assert Filter().calibrated(good, 0.95, 2.0).tail_perplexity == pytest.approx(2 * 96)


def test_the_report_states_that_nothing_is_separated() -> None:
    good, broken = [made("A fox.", t) for t in (1.0, 2.0)], [made("A fox.", t) for t in (3.0, 2.0)]
    blind = separation(Filter(tail_perplexity=100), good, broken)
    assert not blind.separates and (blind.good, blind.broken) == (1.0, 1.0) and "NOT" in str(blind)
    assert blind.auc == pytest.approx(3.5 / 4), "pairs won: 3>1, 3>2, 2>1; one tie"
    keen = separation(Filter(tail_perplexity=2.5), good, [made("A fox.", 9.0)])
    assert keen.separates and keen.broken == 0 and keen.reasons == {"tail perplexity": 1} and keen.auc == 1
    with pytest.raises(SteeringError, match="both kinds"):
        separation(Filter(tail_perplexity=2), good, [])


def test_read_scores_under_the_base_with_any_adapter_attached(nano: en.Policy) -> None:
    """The tail perplexity under the base, also with an adapter on; equal to that from full logits."""
    from tests.engines.conftest import perturb
    from tests.steering.conftest import logits

    prompts = [nano.render([{"role": "user", "content": f"Describe the {t}."}]) for t in ("fox", "lake")]
    answers = [nano.encode("The fox is quick and small."), nano.encode("xx 73 the")]
    plain = read(nano, prompts, answers)
    for prompt, answer, found in zip(prompts, answers, plain, strict=True):
        lp = logits(nano, prompt + answer).double().log_softmax(-1)
        own = torch.stack([lp[len(prompt) - 1 + i, t] for i, t in enumerate(answer)])
        assert found.tail_perplexity == pytest.approx(tail_perplexity(own), rel=1e-3)
    assert plain[1].tail_perplexity > 5 * plain[0].tail_perplexity
    adapter = en.attach(nano, en.LoRA(rank=2), targets=("q_proj", "v_proj"))
    perturb(adapter)
    try:
        assert [s.tail_perplexity for s in read(nano, prompts, answers)] == [s.tail_perplexity for s in plain]
    finally:
        adapter.detach()
