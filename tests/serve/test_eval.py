"""`earnest eval`: its verifiers, its numbers against the server's own, and the whole loop on a small budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from earnest.errors import ConfigError
from earnest.serve.eval import preferences
from earnest.serve.eval.client import EvalClient, EvalError
from earnest.serve.eval.command import run
from earnest.serve.eval.loop import Round, evaluate, summarise, table
from earnest.serve.eval.preferences import FeedbackEvalConfig, Verifier
from tests.serve.conftest import Live


@pytest.mark.parametrize(
    ("verifier", "good", "bad"),
    [
        ({"any_of": ["dear", "glad"]}, "Dear friend.", "The fox."),
        ({"none_of": ["noted"]}, "The fox.", "Noted. The fox."),
        ({"pattern": "!$"}, "Look!", "Look."),
        ({"most_words": 3}, "The fox is", "The fox is red"),
        ({"least_words": 3}, "The fox is", "The fox"),
        ({"most_sentences": 1}, "The fox is red and shy.", "The fox. It is red."),
        ({"ends_with": "!"}, "Look at it! ", "Look!."),
        ({"any_of": ["fox"], "most_words": 2}, "A fox.", "A fox is red."),
    ],
)
def test_verifiers(verifier, good: str, bad: str) -> None:
    made = Verifier.model_validate(verifier)
    assert made.holds(good) and not made.holds(bad)


@given(st.text(alphabet=" \t\n", max_size=5))
def test_an_empty_answer_never_complies(blank: str) -> None:
    for verifier in ({"none_of": ["x"]}, {"most_words": 5}, {"most_sentences": 1}):
        assert not Verifier.model_validate(verifier).holds(blank)


def test_mistakes(tmp_path: Path) -> None:
    good = preferences.read(None, {}).model_dump(mode="python")
    for change, words in (
        ({"rounds": 0}, "rounds"),
        ({"preferences": []}, "preferences"),
        ({"preferences": good["preferences"][:1] * 2}, "same name"),
        ({"preferences": [{**good["preferences"][0], "probes": good["preferences"][0]["prompts"]}]}, "held out"),
        ({"preferences": [{**good["preferences"][0], "verifier": {}}]}, "it has no rule"),
        ({"preferences": [{**good["preferences"][0], "verifier": {"pattern": "("}}]}, "not a regular expression"),
        ({"round": 3}, "rounds"),
    ):
        with pytest.raises(ConfigError, match=words):
            preferences.read(None, change)
    with pytest.raises(ConfigError, match="warm"):
        preferences.read(None, {}, ["wram"])
    with pytest.raises(EvalError, match="is `earnest serve` running there"):
        EvalClient("http://127.0.0.1:9").chat("base", "hi")


@pytest.mark.integration
def test_the_loop(live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live.state.wait()
    run(preferences.read(None, {"rounds": 1, "per_round": 4, "questions": 3}, ["warm"]), tmp_path, url=live.url)
    before, after = (json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines())
    assert (before["round"], before["version"], after["round"], after["version"]) == (0, 0, 1, 1)
    assert after["said"] + after["complied"] == 4 and after["said"] > 0
    # The margin is what the base's own numbers say, pair by pair.
    config = preferences.read(None, {})
    warm = config.preferences[0]
    client = EvalClient(live.url)
    want = [client.score("base", p.prompt, p.chosen) - client.score("base", p.prompt, p.rejected) for p in warm.pairs]
    assert before["margin"] == pytest.approx(sum(want) / len(want), abs=1e-3)
    assert after["margin"] > before["margin"]
    assert 0 <= after["compliance"] <= 1 and after["collapse"]["entropy_ratio"] > 0
    assert (tmp_path / "eval.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "summary.json").exists()
    assert "| warm |" in capsys.readouterr().out
    assert live.http.get("/v1/adapters/eval/warm").status_code == 404  # it cleans up behind itself


def test_capability_counts_right_answers(live: Live, tmp_path: Path) -> None:
    """A question whose allowed answers are likely and absurd is right, the same one turned round is wrong."""
    question = {"prompt": "Answer yes or no. Is 87 larger than 60?", "allowed": ["yes", "zebra no no"], "answer": "yes"}
    data = preferences.read(None, {"rounds": 1, "per_round": 1}).model_dump(mode="python")
    data |= {"preferences": data["preferences"][:1], "capability": [question, {**question, "answer": "zebra no no"}]}
    rounds = evaluate(EvalClient(live.url), FeedbackEvalConfig.model_validate(data), tmp_path, lambda _: None)
    assert rounds[0].capability == 0.5


def test_the_summary() -> None:
    rounds = [
        Round("warm", 0, 0, 1.0, 0.25, 0.8),
        Round(
            "warm",
            1,
            1,
            3.0,
            0.75,
            0.4,
            said=3,
            candidates=1,
            collapse={"entropy_ratio": 0.9, "self_similarity": 0.5, "drift": 0.1},
        ),
    ]
    found = summarise(rounds)["warm"]
    assert found["margin"] == [1.0, 3.0] and found["capability_retained"] == pytest.approx(0.5)
    assert found["feedback"] == 3 and found["refused"] == 1
    assert "| warm | 3 | +1.00 → +3.00 | 25% → 75% | 50% | 0.90 | 0.50 | 0.10 |" in table(summarise(rounds))
