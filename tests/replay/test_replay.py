"""Traces into pairs, from end to end: order, resume, kills, judges, costs; endpoints over HTTP and nano as a policy."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from earnest.config.loading import check_mapping
from earnest.data import trace_example
from earnest.errors import ConfigError
from earnest.replay import pairs as files
from earnest.replay import report
from earnest.replay.errors import EndpointError, ReplayError
from earnest.replay.local import LocalPolicy
from earnest.replay.pipeline import FAILED, SAME, TIE, Replayed, count, replay
from earnest.replay.settings import ReplayConfig
from tests.replay.records import call, said, user, write_traces
from tests.replay.server import Answer, Body, serving

N = 12


def talks(n: int = N) -> list[dict[str, Any]]:
    """Two turns each; the user is never content with the first."""
    return [
        {
            "id": f"talk-{i}",
            "completion_id": f"cmpl-{i}",
            "model": "assistant",
            "version": i,
            "messages": [user(f"question {i}"), said(f"poor answer {i}"), user("no, better"), said(f"late answer {i}")],
        }
        for i in range(n)
    ]


def settings(url: str, tmp: Path, **more: Any) -> ReplayConfig:
    data: dict[str, Any] = {
        "teachers": [{"kind": "endpoint", "model": "big", "base_url": url, "price": {"input": 1.0, "output": 2.0}}],
        "judge": {"kind": "teacher"},
        "concurrency": 4,
        "attempts": 2,
        "backoff": 0.01,
        "timeout": 10.0,
        "max_errors": 0.0,
        "out": str(tmp / "pairs.parquet"),
    }
    return check_mapping(ReplayConfig, data | more)


def good(body: Body, _: int = 0) -> Answer:
    """Slow by chance, so that answers arrive in another order than the requests."""
    time.sleep(random.random() * 0.02)
    return Answer(f"good answer to: {body['messages'][-1]['content']} ({len(body['messages'])})")


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    return write_traces(tmp_path / "traces.jsonl", talks())


def test_every_turn_becomes_a_pair_with_its_provenance_in_the_traces_order(traces: Path, tmp_path: Path) -> None:
    with serving(good) as server:
        found = replay(traces, settings(server.url, tmp_path))
    kept = files.read(tmp_path / "pairs.parquet")
    assert kept == list(found.cleaned.pairs)
    assert [(p.trace, p.turn) for p in kept] == [(f"talk-{i}", t) for i in range(N) for t in (0, 1)]
    first = kept[0]
    assert (first.chosen["content"], first.rejected["content"]) == ("good answer to: question 0 (1)", "poor answer 0")
    assert (first.teacher, first.teacher_model, first.margin, first.judge) == ("endpoint", "big", 1.0, "teacher")
    assert (first.completion_id, first.model, first.version, first.winner) == ("cmpl-0", "assistant", "0", "teacher")
    assert 1 < server.most <= 4, "several at a time, and never more than the limit"
    assert {body["seed"] for body in server.bodies} == {0}
    with serving(good) as other:
        teacher = {"kind": "endpoint", "model": "big", "base_url": other.url, "samples": 2, "temperature": 1.0}
        replay(traces, settings(other.url, tmp_path / "twice", teachers=[teacher], seed=5))
    assert sorted(body["seed"] for body in other.bodies) == [5] * 2 * N + [6] * 2 * N, "one seed for each sample"
    # the state that was replayed is every message before the turn, and nothing behind it
    assert sorted(len(body["messages"]) for body in server.bodies) == [1] * N + [3] * N
    account = found.ledger.accounts["endpoint"]
    assert (account.replies, account.prompt_tokens, account.completion_tokens) == (2 * N, 20 * N, 10 * N)
    assert found.ledger.dollars == pytest.approx(2 * N * (10 * 1.0 + 5 * 2.0) / 1e6)


def test_a_stopped_replay_continues_without_repeating_a_request(traces: Path, tmp_path: Path) -> None:
    """The endpoint refuses after some answers; with other luck and another concurrency the rest is asked for later."""

    def until(body: Body, _: int) -> Answer:
        return good(body) if len(server.bodies) <= 9 else Answer(status=403, raw="quota")

    with serving(until) as server:
        with pytest.raises(EndpointError, match="quota"):
            replay(traces, settings(server.url, tmp_path))
        answered = len((tmp_path / "pairs.parquet.journal.jsonl").read_text().splitlines()) - 1
        assert 1 <= answered <= 9 and not (tmp_path / "pairs.parquet").exists()
        with (tmp_path / "pairs.parquet.journal.jsonl").open("a") as file:
            file.write('{"kind": "answer", "key": "talk-')  # torn by a crash
        server.answer, before = good, len(server.bodies)
        found = replay(traces, settings(server.url, tmp_path, concurrency=2))
        assert len(server.bodies) - before == 2 * N - answered
        assert found.ledger.accounts["endpoint"].replies == 2 * N, "costs count all sessions"
        replay(traces, settings(server.url, tmp_path, min_margin=0.5))  # judged and cleaned anew, nobody is asked
        assert len(server.bodies) - before == 2 * N - answered
        once = tmp_path / "once"
        whole = replay(traces, settings(server.url, once))
    assert found.made == whole.made and found.drops == whole.drops


def test_kill_nine_at_any_moment_loses_no_answer(traces: Path, tmp_path: Path) -> None:
    """`earnest replay` in a process of its own, killed twice while it asks; what was written stays written."""

    def slow(body: Body, _: int) -> Answer:
        time.sleep(0.1)
        return good(body)

    journal = tmp_path / "pairs.parquet.journal.jsonl"
    with serving(slow) as server:
        data = settings(server.url, tmp_path, concurrency=1).model_dump(mode="json")
        (tmp_path / "replay.yaml").write_text(json.dumps(data))
        command = [
            sys.executable,
            "-m",
            "earnest.cli",
            "replay",
            str(traces),
            "--config",
            str(tmp_path / "replay.yaml"),
        ]
        kept = 0
        for goal in (3, 8):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            while not (journal.exists() and journal.read_bytes().count(b"\n") > goal):
                assert process.poll() is None, process.communicate()[1].decode()
                time.sleep(0.02)
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
            assert journal.read_bytes().count(b"\n") - 1 >= max(kept, goal)
            kept = journal.read_bytes().count(b"\n") - 1
        before = len(server.bodies)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert len(server.bodies) - before == 2 * N - kept
    assert "pairs kept" in done.stdout and "train on them" in done.stdout
    assert len(files.read(tmp_path / "pairs.parquet")) == 2 * N


def test_failures_within_the_share_are_dropped_and_counted_beyond_it_they_stop(traces: Path, tmp_path: Path) -> None:
    def flaky(body: Body, _: int) -> Answer:
        return Answer(status=500, raw="no") if body["messages"][-1]["content"] == "question 3" else good(body)

    with serving(flaky) as server:
        with pytest.raises(ReplayError, match=r"1 of 24 requests failed for good, more than the share max_errors=0 "):
            replay(traces, settings(server.url, tmp_path))
        found = replay(traces, settings(server.url, tmp_path, max_errors=0.1))
        assert count(found.drops) == {FAILED: 1} and len(found.made) == 2 * N - 1
        server.answer = good
        again = replay(traces, settings(server.url, tmp_path))  # a failure is not an answer: it is asked again
        assert len(again.made) == 2 * N


def test_a_budget_ends_the_job_and_a_larger_one_goes_on(traces: Path, tmp_path: Path) -> None:
    with serving(good) as server:
        price = (10 * 1.0 + 5 * 2.0) / 1e6
        with pytest.raises(ReplayError, match=r"are spent and max_cost is .* the same command continues"):
            replay(traces, settings(server.url, tmp_path, max_cost=4.5 * price, concurrency=1))
        assert len(server.bodies) == 5, "asked until it was spent, and not beyond"
        assert len(replay(traces, settings(server.url, tmp_path, max_cost=1.0)).made) == 2 * N


@pytest.mark.parametrize("usage", [None, {"prompt_tokens": 10}, {}])
def test_a_budget_is_refused_if_replies_have_no_token_count(
    usage: dict[str, int] | None, traces: Path, tmp_path: Path
) -> None:
    """Counted as nothing they would never reach the limit. Without a limit the job goes on, and reports them."""

    def silent(body: Body, _: int) -> Answer:
        return replace(good(body), usage=usage)

    with serving(silent) as server:
        says = r"max_cost is \$1, but 1 of 1 replies of endpoint came without their token count .* leave max_cost out"
        with pytest.raises(ReplayError, match=says):
            replay(traces, settings(server.url, tmp_path, max_cost=1.0, concurrency=1))
        assert len(server.bodies) == 1
        found = replay(traces, settings(server.url, tmp_path))
        assert len(found.made) == 2 * N and found.ledger.accounts["endpoint"].unknown == 2 * N


def test_another_question_is_another_journal(traces: Path, tmp_path: Path) -> None:
    with serving(good) as server:
        replay(traces, settings(server.url, tmp_path))
        with pytest.raises(ReplayError, match="belongs to other asking; use those settings"):
            replay(traces, settings(server.url, tmp_path, turns="last"))
        write_traces(traces, talks(3))
        with pytest.raises(ReplayError, match="belongs to other traces"):
            replay(traces, settings(server.url, tmp_path))


# --- judges -----------------------------------------------------------------------------------------------------------


def judged(verdict: Any, traces: Path, tmp_path: Path, **more: Any) -> Replayed:
    def answer(body: Body, before: int) -> Answer:
        return Answer(verdict(body["messages"][-1]["content"])) if body["model"] == "judge" else good(body)

    with serving(answer) as server:
        judge = {"kind": "endpoint", "model": "judge", "base_url": server.url}
        return replay(traces, settings(server.url, tmp_path, judge=judge, **more))


def test_a_judge_is_asked_in_both_orders(traces: Path, tmp_path: Path) -> None:
    """A judge that always replies A contradicts itself: a tie, never a pair."""
    with pytest.raises(ReplayError, match=f"none of 24 answers became a pair: 24 × {TIE}"):
        judged(lambda _: "A", traces, tmp_path / "biased")

    def honest(question: str) -> str:
        a = question.index("good answer") if "good answer" in question else 1 << 30
        return "A." if a < question.index("Answer B:") else "**B**"

    found = judged(honest, traces, tmp_path / "honest")
    assert {p.margin for p in found.made} == {1.0} and {p.winner for p in found.made} == {"teacher"}
    assert found.ledger.accounts["judge"].tries == 2 * 2 * N
    loser = judged(lambda q: {"A.": "B", "**B**": "A"}[honest(q)], traces, tmp_path / "loser")
    assert {p.winner for p in loser.made} == {"trace"}, "a teacher may lose: then the trace's answer is chosen"
    assert loser.made[0].chosen["content"] == "poor answer 0"


def test_a_judge_that_replies_something_else_gives_no_verdict(traces: Path, tmp_path: Path) -> None:
    rambles = lambda q: "Well, " if "question 1" in q else "A" if "Answer A:\ngood" in q else "B"  # noqa: E731
    found = judged(rambles, traces, tmp_path, turns="last")
    assert count(found.drops) == {"the judge replied 'well,' instead of A, B or tie": 3}  # questions 1, 10 and 11


def test_a_grader_judges_by_its_rewards(tmp_path: Path) -> None:
    """sort: the right answer is worth 1. Hand-made: wrong trace and right teacher, the other way round, both right."""
    meta = {"task": "sort", "data": {"question": "Sort 312.", "answer": "123", "content": "312"}}
    lines = [
        {"id": str(i), "messages": [user("Sort 312."), said(text)], "meta": meta}
        for i, text in enumerate(("321", "123"))
    ]
    lines.append({"id": "2", "messages": [user("Sort 312."), said("321")]})
    traces = write_traces(tmp_path / "t.jsonl", lines)
    answers = iter(("123", "132", "123"))
    with serving(lambda *_: Answer(next(answers))) as server:
        found = replay(traces, settings(server.url, tmp_path, judge={"kind": "task"}, concurrency=1))
    assert [(p.trace, p.winner, p.margin) for p in found.made] == [("0", "teacher", 1.0), ("1", "trace", 1.0)]
    assert [d.reason for d in found.drops] == ["the trace has no meta.task and meta.data, so no grader can judge it"]


def test_an_environment_judges_a_turn_by_how_the_conversation_ends_after_it(tmp_path: Path) -> None:
    """lookup: the lamp costs as much as the boat. Hand-made: what each of three turns is worth, and its rival."""
    prices = {"lamp": "as the boat", "boat": "7 coins"}
    data = {"question": "What does the lamp cost?", "item": "lamp", "prices": prices, "answer": "7 coins"}
    asked = user(str(data["question"]))
    first, second = call("price", 0, item="lamp"), call("price", 1, item="boat")
    told, price = ({"role": "tool", "tool_call_id": f"c{i}", "content": prices[k]} for i, k in enumerate(prices))
    right = [asked, first, told, second, price, said("The lamp costs 7 coins.")]
    meta = {"task": "lookup", "data": data}
    lines = [
        {"id": "right", "messages": right, "meta": meta},
        {"id": "guess", "messages": [asked, said("The lamp costs 3 coins.")], "meta": meta},
        {"id": "other", "messages": [asked, first, {**told, "content": "9 coins"}, said("9 coins")], "meta": meta},
    ]
    answers = {  # by the length of the state
        "right": {
            1: said("It costs 5 coins."),
            3: call("price", item="chair"),
            5: said("The lamp costs 7 coins, yes."),
        },
        "guess": {1: call("price", item="lamp")},
        "other": {1: call("price", item="boat"), 3: said("It costs 7 coins.")},
    }
    names = iter(["right"] * 3 + ["guess"] + ["other"] * 2)

    def answer(body: Body, _: int) -> Answer:
        message = answers[next(names)][len(body["messages"])]
        return Answer(message["content"], message.get("tool_calls"))

    traces = write_traces(tmp_path / "t.jsonl", lines)
    with serving(answer) as server:
        found = replay(traces, settings(server.url, tmp_path, judge={"kind": "task"}, concurrency=1))
    assert [(p.trace, p.turn, p.winner, p.margin) for p in found.made] == [
        ("right", 0, "trace", 1.0),
        ("right", 1, "trace", 1.0),
        ("guess", 0, "teacher", 1.0),
    ]
    assert [(d.trace, d.turn, d.reason) for d in found.drops] == [
        ("right", 2, TIE),
        ("other", 0, TIE),
        ("other", 1, "the environment lookup replies in another way than in the trace"),
    ]


def test_what_cannot_be_used_has_a_reason(tmp_path: Path) -> None:
    lines = [{"id": str(i), "messages": [user(f"q{i}"), said("the answer")]} for i in range(4)]
    broken = [{"id": "c", "type": "function", "function": {"arguments": "{}"}}]
    answers = {"q0": Answer("the answer "), "q1": Answer("long", finish="length"), "q2": Answer(None, broken)}
    with serving(lambda body, _: answers.get(body["messages"][-1]["content"], Answer("new"))) as server:
        found = replay(write_traces(tmp_path / "t.jsonl", lines), settings(server.url, tmp_path))
    assert [d.reason for d in found.drops][:2] == [SAME, "cut off at 256 tokens"]
    assert found.drops[2].reason.startswith("the endpoint's answer is malformed: messages[1].tool_calls[0]")
    assert [p.trace for p in found.made] == ["3"]


def test_what_the_user_typed_instead_is_a_teacher(tmp_path: Path) -> None:
    lines = [{"id": "a", "messages": [user("q"), said("x")], "meta": {"better": "y"}}]
    lines.append({"id": "b", "messages": [user("q"), said("x")]})
    config = check_mapping(
        ReplayConfig,
        {"teachers": [{"kind": "user"}], "judge": {"kind": "teacher"}, "out": str(tmp_path / "p.parquet")},
    )
    found = replay(write_traces(tmp_path / "t.jsonl", lines), config)
    assert [(p.trace, p.chosen["content"]) for p in found.made] == [("a", "y")]
    assert [d.reason for d in found.drops] == ["no user gave a better answer"]


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({"teachers": []}, "teachers"),
        ({"teachers": [{"kind": "endpoint"}]}, "base_url: an endpoint needs its address"),
        ({"teachers": [{"kind": "policy", "base_url": "http://x"}]}, "belong to an endpoint"),
        ({"teachers": [{"kind": "policy", "temperature": 0.0, "samples": 2}]}, "greedy answers are all the same"),
        ({"teachers": [{"kind": "policy"}, {"kind": "policy"}]}, "two are called 'policy'"),
        ({"judge": {"kind": "teacher", "task": "sort"}}, "judge.task: has no meaning"),
        ({"judge": {"kind": "task", "model": "other"}}, "asks no model"),
        ({"teachers": [{"kind": "policy"}], "max_cost": 1.0}, "no endpoint has a price"),
        ({"clean": [{"op": "words"}]}, "neither min nor max"),
        ({"concurency": 3}, "concurrency"),
        ({"max_errors": -0.1}, "max_errors"),
        ({"max_errors": 1.1}, "max_errors"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(overrides: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ReplayError), match=why):
        settings("http://x/v1", tmp_path, **overrides)


# --- nano -------------------------------------------------------------------------------------------------------------


def local(tmp_path: Path, **more: Any) -> ReplayConfig:
    data: dict[str, Any] = {
        "teachers": [
            {"kind": "policy", "temperature": 1.0, "max_tokens": 40, "samples": 2},
            {"kind": "hindsight", "temperature": 1.0, "max_tokens": 40},
        ],
        "judge": {"kind": "likelihood"},
        "out": str(tmp_path / "pairs.parquet"),
    }
    return check_mapping(ReplayConfig, data | more)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Replayed]:
    """nano on the shipped agent traces, as a policy, with hindsight, and as the judge."""
    place = tmp_path_factory.mktemp("agent")
    return place, replay(write_traces(place / "t.jsonl", trace_example()), local(place))


def test_a_policy_answers_with_calls_and_a_judge_with_hindsight_scores_them(agent: tuple[Path, Replayed]) -> None:
    _, found = agent
    assert found.asked == 3 * 3 * len(trace_example()) == len(found.made) + len(found.drops)
    calls = [p for p in found.made if p.chosen.get("tool_calls") or p.rejected.get("tool_calls")]
    assert calls, "nano calls tools at the first turn"
    for p in found.made:
        assert p.margin > 0 and p.judge == "likelihood" and p.teacher in ("policy", "hindsight") and p.tools
    reasons = count(found.drops)
    assert "no message follows" in reasons and SAME in reasons


def test_the_calls_of_a_local_teacher_are_read_in_the_format_of_its_template() -> None:
    teacher = LocalPolicy("nano", None)
    teacher.policy.tokenizer.chat_template = "[TOOL_CALLS]"
    tokens = teacher.policy.encode('[TOOL_CALLS]price[ARGS]{"item": "lamp"}')
    message, why = teacher.read([], tokens)
    assert message is not None and not why
    assert message["tool_calls"][0]["function"] == {"name": "price", "arguments": '{"item": "lamp"}'}
    assert teacher.read([], tokens[:-2]) == (None, "its tool call cannot be read")


def test_the_margin_is_the_difference_of_mean_log_probs(agent: tuple[Path, Replayed]) -> None:
    """Recomputed for a pair from the model's own logits, token by token."""
    import torch

    import earnest as en
    from earnest.data import hindsight
    from earnest.models.replies import message_tokens

    _, found = agent
    pair = found.made[0]
    policy = en.load("nano")
    turn = next(
        t for trace in found.traces.traces if trace.id == pair.trace for t in trace.turns() if t.number == pair.turn
    )
    assert turn.next_message is not None
    prompt = policy.render(hindsight(turn.state, turn.next_message), tools=turn.trace.tools)
    means = []
    for answer in (pair.chosen, pair.rejected):
        reply = message_tokens(policy, turn.state, answer, turn.trace.tools)[1]
        with torch.no_grad():
            logits = policy.model(torch.tensor([prompt + reply])).logits[0].double()
        steps = [float(logits[len(prompt) + i - 1].log_softmax(-1)[token]) for i, token in enumerate(reply)]
        means.append(sum(steps) / len(steps))
    assert means[0] - means[1] == pytest.approx(pair.margin, rel=1e-4)


def test_a_local_replay_resumes_to_the_same_pairs(agent: tuple[Path, Replayed], tmp_path: Path) -> None:
    """Half of the journal is gone, in the middle of a chunk; the rest is sampled again, draw for draw."""
    place, found = agent
    lines = (place / "pairs.parquet.journal.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "pairs.parquet.journal.jsonl").write_text("".join(lines[: len(lines) // 3]))
    again = replay(place / "t.jsonl", local(tmp_path))
    assert again.made == found.made and again.drops == found.drops


def test_the_report_says_what_was_dropped_and_why(agent: tuple[Path, Replayed], tmp_path: Path) -> None:
    place, _ = agent
    (tmp_path / "pairs.parquet.journal.jsonl").write_text((place / "pairs.parquet.journal.jsonl").read_text())
    clean = [{"op": "exact_duplicates", "field": "pair"}, {"op": "text_length", "field": "prompt", "min": 25}]
    found = replay(place / "t.jsonl", local(tmp_path, clean=clean))
    data, page = report.write(found)
    assert json.loads((tmp_path / "pairs.parquet.report.json").read_text())["pairs_kept"] == len(found.cleaned.pairs)
    assert data["answers_asked"] == sum(d["count"] for d in data["no_pair"]) + data["pairs_made"]
    assert data["pairs_made"] == sum(f["dropped"] for f in data["filters"]) + data["pairs_kept"]
    assert all(len(d["examples"]) >= 1 for d in data["no_pair"])
    assert any(f["dropped"] and f["examples"][0]["text"] for f in data["filters"])
    text = page.read_text()
    assert "http://" not in text and "https://" not in text, "the page loads nothing"
    for d in data["no_pair"]:
        assert d["reason"].replace("'", "&#x27;") in text or d["reason"] in text
