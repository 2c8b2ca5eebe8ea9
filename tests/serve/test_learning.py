"""Feedback becomes a version, the version answers; versions are rolled back, pinned, compared, exported, forked."""

from __future__ import annotations

import io
import json
import sqlite3
import time
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

import earnest as en
from earnest.errors import EarnestError
from earnest.serve import learner, lessons
from earnest.serve.learning import LearnConfig, overridden
from tests.runs.tiny import tiny_folder
from tests.serve.conftest import Live, serving

WORDS = ("fox", "river", "lamp", "rain")
SMALL = {"prompts": ["Hi!"], "samples": 2, "max_new_tokens": 2, "self_similarity": 1, "entropy_ratio": 0, "drift": 50}


def _score(live: Live, model: str, text: str, answer: str) -> float:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "completion": answer}
    return live.post("/v1/score", body)["logprob_sum"]


def _teach_all(live: Live, name: str, **said) -> dict:
    chats = [live.chat(name, f"Describe the {w}.", seed=i) for i, w in enumerate(WORDS)]
    items = [{"completion_id": c["id"], **said} for c in chats]
    found = live.http.post("/v1/feedback", json={"feedback": items})
    assert found.status_code == 202, found.text
    return live.learned(found.json()["data"][-1])


def test_feedback_changes_the_answers(live: Live, adapter, caplog) -> None:
    """After feedback for warmth, warm answers are likelier than cold ones, also for a question without feedback."""
    caplog.set_level("INFO", "earnest.serve")
    name = adapter("team/warm", updates=8)
    question = "Describe the moon."
    warm, cold = "Dear friend, the moon is lovely. I am glad you asked.", "Noted. The moon is grey. That is all."

    def margin() -> float:
        return _score(live, name, question, warm) - _score(live, name, question, cold)

    before = margin()
    assert live.chat(name, question)["adapter_version"] == 0
    given = _teach_all(live, name, text="Warmer please.")
    assert given["status"] == "applied" and given["version"] == 1
    assert f"{name}: version 1 is live (after 4 feedback, " in caplog.text
    answered = live.chat(name, question)
    assert answered["adapter_version"] == 1
    assert live.state.store.completion(answered["id"]).version == 1
    after = margin()
    assert after > before + 0.5
    # The base, and the version before, are untouched.
    assert _score(live, f"{name}@0", question, warm) == _score(live, "base", question, warm)

    version = live.get(f"/v1/adapters/{name}/versions/1")
    assert version["status"] == "promoted" and version["live"] and version["reason"] == ""
    assert len(version["feedback"]) == 4 and version["parent"] == 0
    assert version["config"]["objective"][0]["kind"] == "sdpo" and version["config"]["updates"] == 8
    laws = {(f["law"], f["outcome"]) for f in version["audit"]["findings"]}
    assert ("GL", "holds") in laws and ("SV", "holds") in laws and not any(o == "fails" for _, o in laws)
    subjects = {f["subject"]: f["outcome"] for f in version["gate"]["findings"]}
    assert subjects == {
        "held-out margin": "not applicable",
        "entropy ratio": "holds",
        "self-similarity": "holds",
        "log-prob drift": "holds",
    }
    assert version["metrics"]["loss"] < version["metrics"]["loss_first"]
    assert "sdpo" in version["report"]["terms"] and "ρ" in version["report"]["terms"]["sdpo"]["ran"]
    assert all({"before", "after", "said", "given", "prompt"} <= set(a) for a in version["answers"])

    # Roll back: the answers of version 0 are back at once; the next version is made from it.
    assert live.post(f"/v1/adapters/{name}/rollback")["live"] == 0
    assert live.chat(name, question)["adapter_version"] == 0 and margin() == pytest.approx(before, abs=1e-4)
    assert live.post(f"/v1/adapters/{name}/rollback", {"version": 1})["live"] == 1

    # Pinned: what is learned meanwhile is a candidate, and says why.
    assert live.post(f"/v1/adapters/{name}/pin", {"version": 1})["pinned"]
    given = _teach_all(live, name, thumbs="up")
    assert (given["status"], given["version"]) == ("held", 2) and live.get(f"/v1/adapters/{name}")["live"] == 1
    candidate = live.get(f"/v1/adapters/{name}/versions/2")
    assert candidate["status"] == "candidate" and "pinned at version 1" in candidate["reason"]
    assert live.chat(f"{name}@2")["adapter_version"] == 2  # but it can be asked by its number
    live.post(f"/v1/adapters/{name}/pin", {"version": None})
    assert live.post(f"/v1/adapters/{name}/promote", {"version": 2})["live"] == 2

    # What lies between them.
    diff = live.get(f"/v1/adapters/{name}/diff", old=1, new=2)
    assert diff["feedback_only_in_new"] == candidate["feedback"] and diff["feedback_only_in_old"] == []
    assert diff["weights"]["change"] > 0 and all(v["new"] > 0 for v in diff["weights"]["layers"].values())
    assert live.get(f"/v1/adapters/{name}/diff", old=2, new=2)["weights"]["change"] == 0
    assert live.get(f"/v1/adapters/{name}/diff", old=0, new=1)["weights"]["change"] > 0

    # A fork starts from the version, and goes its own way.
    assert live.post(f"/v1/adapters/{name}/fork", {"name": "team/other", "version": 1}, 201)["live"] == 1
    assert _score(live, "team/other", question, warm) == pytest.approx(
        _score(live, f"{name}@1", question, warm), abs=1e-5
    )
    given = live.learned(live.teach(live.chat("team/other", question), text="Too friendly."))
    assert given["version"] == 2 and live.get(f"/v1/adapters/{name}")["live"] == 2
    assert live.http.delete("/v1/adapters/team/other").json()["deleted"]
    assert live.http.get("/v1/adapters/team/other").status_code == 404

    # Deleting: not what is live, nor what another was made from.
    assert live.http.delete(f"/v1/adapters/{name}/versions/2").status_code == 409
    live.post(f"/v1/adapters/{name}/rollback", {"version": 1})
    assert live.http.delete(f"/v1/adapters/{name}/versions/1").status_code == 409
    assert live.http.delete(f"/v1/adapters/{name}/versions/2").status_code == 200
    assert [v["number"] for v in live.get(f"/v1/adapters/{name}/versions")["data"]] == [1]
    assert live.http.get(f"/v1/adapters/{name}/versions/2/export").status_code == 404
    base = live.http.get(f"/v1/adapters/{name}/versions/0/export")
    assert base.status_code == 404
    assert base.json()["error"]["message"] == "version 0 is the base; there is nothing to export."


@pytest.mark.integration
def test_export_is_what_peft_reads(live: Live, adapter, tmp_path: Path) -> None:
    """The zip, read by PEFT on a model of its own, gives the log-probs that the server gives."""
    from peft import PeftModel

    name = adapter("team/exported")
    _teach_all(live, name, better="Dear friend, it is lovely.")
    found = live.http.get(f"/v1/adapters/{name}/versions/1/export")
    assert (
        found.headers["content-type"] == "application/zip"
        and "team-exported-v1.zip" in found.headers["content-disposition"]
    )
    zipfile.ZipFile(io.BytesIO(found.content)).extractall(tmp_path)
    record = json.loads((tmp_path / "version.json").read_text())
    assert len(record["feedback"]) == 4
    policy = en.load("nano")
    prompt = policy.render([{"role": "user", "content": "Describe the moon."}])
    scored = live.post(
        "/v1/score",
        {
            "model": name,
            "messages": [{"role": "user", "content": "Describe the moon."}],
            "completion": "The moon is old.",
        },
    )
    peft = PeftModel.from_pretrained(policy.model, tmp_path)
    ids = torch.tensor([[*prompt, *scored["token_ids"]]])
    with torch.no_grad():
        logits = peft(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
    want = [float(row[t]) for row, t in zip(logits, scored["token_ids"], strict=True)]
    assert scored["logprobs"] == pytest.approx(want, abs=1e-4)


def test_a_version_that_fails_the_gate_is_a_candidate(live: Live, adapter, caplog) -> None:
    """Held-out pairs that want cold answers, and a bound on drift, refuse a version that learns warmth too hard."""
    pair = {
        "prompt": "Describe the moon.",
        "chosen": "Noted. The moon is grey.",
        "rejected": "Dear friend, the moon is lovely.",
    }
    caplog.set_level("INFO", "earnest.serve")
    name = adapter("gated", updates=6, optimizer={"lr": 0.02}, gate={"pairs": [pair], "margin": 0.0, "drift": 0.01})
    given = _teach_all(live, name, text="Warmer please.")
    assert given["status"] == "held" and given["version"] == 1 and "log-prob drift" in given["note"]
    assert f"{name}: version 1 is a candidate and not live (after 4 feedback, " in caplog.text
    assert "log-prob drift" in caplog.text
    assert live.get(f"/v1/adapters/{name}")["feedback"]["held"] == 4
    version = live.get(f"/v1/adapters/{name}/versions/1")
    assert version["status"] == "candidate" and not version["live"] and not version["gate"]["holds"]
    assert "held-out margin" in version["reason"] and "log-prob drift" in version["reason"]
    assert live.chat(name)["adapter_version"] == 0
    refused = live.http.post(f"/v1/adapters/{name}/rollback", json={"version": 1})
    assert refused.status_code == 409 and "promote it instead" in refused.json()["error"]["message"]
    # The next one is made from the live version, not from the candidate.
    later = live.learned(live.teach(live.chat(name), text="Too loud."))
    assert live.get(f"/v1/adapters/{name}/versions/2")["parent"] == 0
    # Promoted by hand, it answers, and what it learned from is applied; the other candidate's is not.
    live.post(f"/v1/adapters/{name}/promote", {"version": 1})
    found = live.get(f"/v1/feedback/{given['id']}")
    assert (found["status"], found["version"], found["note"]) == ("applied", 1, "")
    assert later["status"] == "held" and live.get(f"/v1/feedback/{later['id']}") == later
    assert live.http.delete(f"/v1/adapters/{name}/versions/2").status_code == 200
    assert live.get(f"/v1/feedback/{later['id']}")["note"] == "version 2 was a candidate and is deleted"


def test_what_the_gate_holds_out_is_not_learned_from(live: Live, adapter) -> None:
    """Learning from a held-out prompt would raise its margin; feedback on one is stored and unused."""
    pair = {"prompt": "Describe the moon.", "chosen": "Dear friend, it is lovely.", "rejected": "Noted. It is grey."}
    name = adapter("held-out", gate={"pairs": [pair]})
    chats = [live.chat(name, text) for text in ("Describe the moon.", " describe  the MOON.\n", "Describe the fox.")]
    plain = live.post("/v1/completions", {"model": name, "prompt": "Describe the moon.", "max_tokens": 4})
    items = [{"completion_id": c["id"], "better": "Dear friend, it is lovely."} for c in (*chats, plain)]
    data = live.http.post("/v1/feedback", json={"feedback": items}).json()["data"]
    found = [live.learned(f) for f in data]
    assert [f["status"] for f in found] == ["unused", "unused", "applied", "unused"]
    assert "held out" in found[0]["note"] and found[0]["version"] is None
    version = live.get(f"/v1/adapters/{name}/versions/1")
    assert version["feedback"] == [found[2]["id"]]
    margin = next(f for f in version["gate"]["findings"] if f["subject"] == "held-out margin")
    assert margin["outcome"] == "holds" and "margin_change" in version["metrics"]["gate"]


def test_a_version_continues_its_parent_bit_for_bit(live: Live, adapter) -> None:
    """Two versions of one feedback each: the second starts from the first's weights and optimizer moments."""
    name = adapter("chained")
    for i, word in enumerate(WORDS[:2]):
        live.learned(live.teach(live.chat(name, f"Describe the {word}.", seed=i), text="Too cold."))
    row = live.state.store.adapter(name)
    from earnest.engines import checkpoint

    first = checkpoint.read(live.state.store.version_folder(row.id, 1) / "engine")
    second = checkpoint.read(live.state.store.version_folder(row.id, 2) / "engine")
    assert (first[1]["version"], second[1]["version"]) == (2, 4)  # two updates each
    assert {k for k in first[0] if k.startswith("optimizer.")} == {k for k in second[0] if k.startswith("optimizer.")}


@pytest.mark.parametrize(
    ("objective", "said", "status"),
    [
        ([{"kind": "dpo"}], {"better": "Dear friend, it is lovely."}, "applied"),
        ([{"kind": "dpo"}], {"text": "Too cold."}, "unused"),
        (
            [{"kind": "sft"}, {"kind": "sdpo", "weight": 0.5}],
            {"better": "Dear friend.", "text": "Too cold."},
            "applied",
        ),
        ([{"kind": "sft"}], {"thumbs": "up"}, "applied"),
        ([{"kind": "sft"}], {"thumbs": "down"}, "unused"),
        ([{"kind": "reinforce"}], {"thumbs": "down"}, "applied"),
        ([{"kind": "reinforce"}], {"text": "Too cold."}, "unused"),
    ],
)
def test_any_objective_by_config(live: Live, adapter, objective, said, status: str) -> None:
    name = adapter("objective", objective=objective, updates=1)
    found = live.learned(live.teach(live.chat(name), **said))
    assert found["status"] == status, found
    if status == "unused":
        assert "does not use feedback of this kind" in found["note"]
        assert live.get(f"/v1/adapters/{name}")["live"] == 0
    else:
        terms = live.get(f"/v1/adapters/{name}/versions/1")["report"]["terms"]
        assert sorted(t["kind"] for t in terms.values()) == sorted(o["kind"] for o in objective)


def test_thumbs_move_the_log_probs_up_and_down(live: Live, adapter) -> None:
    """A thumb down makes the answer less likely, a thumb up more: a sign error would show here."""
    for thumbs, sign in (("up", 1), ("down", -1)):
        name = adapter(f"thumb-{thumbs}", objective=[{"kind": "reinforce"}])
        live.learned(live.teach(live.chat(name, seed=4), thumbs=thumbs))
        numbers = live.get(f"/v1/adapters/{name}/versions/1")["metrics"]
        assert sign * (numbers["logprob_after"]["rollout"] - numbers["logprob_before"]["rollout"]) > 0.01


def test_feedback_that_cannot_be_learned_from_has_a_reason(live: Live, adapter) -> None:
    """A feedback too long for the model fails alone; the others of its batch are learned."""
    name = adapter("mixed")
    items = [
        {"completion_id": live.chat(name, f"Describe the {w}.")["id"], "text": t}
        for w, t in zip(WORDS, ("Too cold.", "x " * 400, "Too loud.", "Warmer please."), strict=True)
    ]
    data = live.http.post("/v1/feedback", json={"feedback": items}).json()["data"]
    found = [live.learned(f) for f in data]
    assert [f["status"] for f in found] == ["applied", "failed", "applied", "applied"]
    assert "512" in found[1]["note"] and found[1]["version"] is None


def test_after_a_failed_batch_each_feedback_is_alone_and_later_ones_are_together(
    live: Live, adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = learner.Learner._learn

    def learn(self, row, config, feedback):
        sizes.append(len(feedback))
        if len(sizes) == 1:
            raise EarnestError("one of them fails")
        return real(self, row, config, feedback)

    monkeypatch.setattr(learner.Learner, "_learn", learn)
    name = adapter("together", updates=1, gate=SMALL)
    for count in (3, 2):
        items = [{"completion_id": live.chat(name)["id"], "text": "Too cold."} for _ in range(count)]
        for given in live.http.post("/v1/feedback", json={"feedback": items}).json()["data"]:
            assert live.learned(given)["status"] == "applied"
    assert sizes == [3, 1, 1, 1, 2]


def test_each_gate_compares_with_the_base_on_its_own_probes(live: Live, adapter) -> None:
    """A version that answers as the base does passes, however much the base repeats itself."""
    for number, prompt in enumerate(("Hi!", "Describe the sea.")):
        probes = {"prompts": [prompt], "samples": 6, "max_new_tokens": 8, "self_similarity": 1e-6}
        name = adapter(f"probes-{number}", updates=1, optimizer={"kind": "adamw", "lr": 1e-7}, gate=probes)
        given = live.learned(live.teach(live.chat(name), text="Too cold."))
        numbers = live.get(f"/v1/adapters/{name}/versions/1")["metrics"]["gate"]
        assert numbers["entropy_ratio"] == pytest.approx(1, abs=1e-3)
        assert numbers["self_similarity"] == numbers["self_similarity_base"] > 0
        assert given["status"] == "applied"


def test_a_full_disk_loses_nothing(live: Live, adapter, monkeypatch) -> None:
    """Whichever call reports a full disk, the feedback waits and is learned from later."""
    monkeypatch.setattr(learner, "RETRY", 0.05)
    troubles = [
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        sqlite3.OperationalError("database or disk is full"),
        MemoryError(),
    ]
    save = learner.YieldingEngine.save

    def full(self, folder):
        if troubles:
            raise troubles.pop(0)
        return save(self, folder)

    monkeypatch.setattr(learner.YieldingEngine, "save", full)
    name = adapter("no-room", updates=1, gate=SMALL)
    given = live.learned(live.teach(live.chat(name), text="Too cold."))
    assert (given["status"], given["version"]) == ("applied", 1) and not troubles
    place = live.state.store.version_folder(live.state.store.adapter(name).id, 0).parent
    assert [p.name for p in place.iterdir()] == ["1"], "half of a version is left"


def test_one_adapter_that_cannot_be_written_stops_no_other(live: Live, adapter, monkeypatch, caplog) -> None:
    monkeypatch.setattr(learner, "RETRY", 0.05)
    monkeypatch.setattr(learner, "RETRY_MOST", 0.2)
    stuck, free = (adapter(name, updates=1, gate=SMALL) for name in ("stuck", "free"))
    place = live.state.store.version_folder(live.state.store.adapter(stuck).id, 0).parent
    place.parent.mkdir(exist_ok=True)
    place.write_text("a file where the folder of its versions should be")
    first = live.teach(live.chat(stuck), text="Too cold.")
    second = live.teach(live.chat(free), text="Too cold.")
    while (found := live.get(f"/v1/feedback/{second['id']}"))["status"] == "queued":
        assert sum(r.levelname == "ERROR" for r in caplog.records) < 30, "the other adapter never gets its turn"
        time.sleep(0.05)
    assert found["status"] == "applied" and live.get(f"/v1/feedback/{first['id']}")["status"] == "queued"
    place.unlink()
    assert live.learned(first)["status"] == "applied"


def test_feedback_refusals(live: Live) -> None:
    chat = live.chat("base")
    post = lambda **body: live.http.post("/v1/feedback", json=body)  # noqa: E731
    assert "does not learn" in post(completion_id=chat["id"], text="Hm.").json()["error"]["message"]
    assert post(completion_id="chatcmpl-unknown", text="Hm.").status_code == 404
    assert post(completion_id=chat["id"]).status_code == 400
    assert post(completion_id=chat["id"], text="   ").status_code == 400


def test_all_laws_on_request(live: Live, adapter) -> None:
    """``audit: full`` proves every law on the update, not only that all is alive, and the version keeps the verdict."""
    laws = {}
    for audit in ("alive", "full"):
        name = adapter(f"laws-{audit}", audit=audit, updates=1)
        given = _teach_all(live, name, text="Too cold.")
        verdict = live.get(f"/v1/adapters/{name}/versions/{given['version']}")["audit"]
        assert given["status"] == "applied" and verdict["holds"]
        laws[audit] = {f["law"] for f in verdict["findings"]}
    assert laws["alive"] < laws["full"] and {"IG", "F64", "DF"} <= laws["full"]


def test_a_plain_text_is_learned_from_too(live: Live, adapter) -> None:
    """Its teacher reads the feedback above the text that it continues; the student's prompt stays as it was."""
    name = adapter("plain")
    items = []
    for word, said in zip(WORDS, ({"text": "Too cold."}, {"better": " is warm."}, {"thumbs": "down"}), strict=False):
        body = {"model": name, "prompt": f"The {word} in the garden", "max_tokens": 6}
        items.append({"completion_id": live.post("/v1/completions", body)["id"], **said})
    found = [live.learned(f) for f in live.http.post("/v1/feedback", json={"feedback": items}).json()["data"]]
    assert [f["status"] for f in found] == ["applied"] * 3
    answers = live.get(f"/v1/adapters/{name}/versions/{found[0]['version']}")["answers"]
    assert answers[0]["prompt"] == f"The {WORDS[0]} in the garden" and answers[0]["said"] == "Too cold."
    state = live.state
    assert state.learner is not None
    config = overridden(state.learner.config, {})
    given = [state.store.feedback(f["id"]) for f in found]
    rows = lessons.gather(state, config, config.build_objective(), given).rows
    for row, word, said in zip(rows, WORDS, ("Too cold.", "is warm.", config.thumbs.down), strict=False):
        text, given = state.text.decode(row.prompt), state.text.decode(row.teacher_prompt or ())
        assert text == f"The {word} in the garden" and given.endswith(f"\n\n{text}") and said in given[: -len(text)]


def test_another_model_than_nano_learns(tmp_path: Path) -> None:
    """A folder with another architecture, tokenizer and template: chat, feedback, the version answers, and a restart
    with the same folder goes on from it."""
    model = str(tiny_folder(tmp_path / "tiny"))
    with serving(tmp_path, model=model, adapters=("tiny",)) as live:
        chat = live.chat("tiny", "say up", seed=1)
        given = live.learned(live.teach(chat, better="up!"))
        assert (given["status"], given["version"]) == ("applied", 1), given
        again = live.chat("tiny", "say up", seed=1)
        assert (chat["adapter_version"], again["adapter_version"]) == (0, 1)
        scores = [_score(live, name, "say up", "up!") for name in ("base", "tiny@0", "tiny")]
        assert scores[0] == scores[1] < scores[2]
    with serving(tmp_path, model=model, adapters=("tiny",)) as live:
        assert _score(live, "tiny", "say up", "up!") == pytest.approx(scores[2], abs=1e-5)
    with serving(tmp_path) as other:  # nano on a folder of this model's tokens
        while other.state.host.failure is None:
            time.sleep(0.01)
        assert "take another folder" in other.state.host.failure


def test_feedback_that_is_sent_twice_counts_once(live: Live, adapter) -> None:
    name = adapter("twice")
    chat = live.chat(name)
    first = live.teach(chat, text="Too cold.", id="mine-1")
    again = live.teach(chat, text="Too cold.", id="mine-1")
    assert not first["known_already"] and again["known_already"]
    assert (
        live.http.post("/v1/feedback", json={"completion_id": chat["id"], "text": "No.", "id": "mine-1"}).status_code
        == 409
    )
    live.learned(first)
    assert live.get(f"/v1/adapters/{name}/versions/1")["feedback"] == ["mine-1"]
    assert live.get("/v1/feedback", adapter=name)["counts"] == {
        "queued": 0,
        "applied": 1,
        "held": 0,
        "unused": 0,
        "failed": 0,
        "cancelled": 0,
    }


def test_feedback_on_the_base_may_teach_an_adapter(live: Live, adapter) -> None:
    name = adapter("student")
    found = live.learned(live.teach(live.chat("base"), text="Too cold.", adapter=name))
    assert found["adapter"] == name and found["version"] == 1


def test_settings_are_checked(live: Live) -> None:
    for learn, words in (
        ({"optimizer": {"lrr": 1}}, "lr"),
        ({"objective": [{"kind": "sdp"}]}, "sdpo"),
        ({"adapter": {"kind": "eva", "rank": 4}}, "reads data at initialization"),
    ):
        found = live.http.post("/v1/adapters", json={"name": "wrong", "learn": learn})
        assert found.status_code == 400 and words in found.json()["error"]["message"]
    for name in ("base", "a/b/c", "../etc", "a b", "", "x/versions", "a..b", ".", "a/", "/a", "a\x00b"):
        assert live.http.post("/v1/adapters", json={"name": name}).status_code == 400, name
    for name in ("assistant", "nano"):
        assert live.http.post("/v1/adapters", json={"name": name}).status_code == 409


def test_overrides_merge() -> None:
    config = LearnConfig.model_validate({})
    found = overridden(config, {"gate": {"drift": 1.0}, "updates": 7})
    assert found.gate.drift == 1.0 and found.gate.samples == config.gate.samples and found.updates == 7
    assert overridden(config, {"adapter": {"kind": "dora", "rank": 2}}).adapter.kind == "dora"


def test_chats_are_answered_during_an_update(live: Live, adapter) -> None:
    """Answers are given between the micro-batches of an update, by the version from before; nothing waits for it."""
    name = adapter("busy", updates=24, micro_tokens=32)
    given = [live.teach(live.chat(name, f"Describe the {w}.", seed=i), text="Too cold.") for i, w in enumerate(WORDS)]
    during = 0
    while live.http.get(f"/v1/feedback/{given[-1]['id']}").json()["status"] == "queued":
        learning = live.get("/health")["learning"]
        answer = live.chat(name, "Describe the sea.", max_tokens=4)
        if learning is not None and learning["phase"] == "step" and learning["step"] < 23:
            assert answer["adapter_version"] < learning["version"]
            during += 1
    assert during >= 2
    assert live.chat(name)["adapter_version"] > 0


def test_events_are_published_for_each_phase(live: Live, adapter) -> None:
    name = adapter("watched")
    seen: list[tuple[str, dict]] = []
    with live.http.stream("GET", "/v1/events", headers={"Last-Event-ID": "0"}, timeout=60) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        given = live.teach(live.chat(name), text="Too cold.")
        kind = ""
        for line in stream.iter_lines():
            if line.startswith("event: "):
                kind = line[7:]
            elif line.startswith("data: "):
                data = json.loads(line[6:])
                if data["adapter"] == name:
                    seen.append((kind, data))
                    if kind == "version":
                        break
    kinds = [k for k, _ in seen]
    assert (seen[0][1]["live"], seen[0][1]["pinned"]) == (0, False)
    assert kinds[0] == "adapter" and kinds[1] == "feedback" and kinds[-1] == "version" and "learn" in kinds
    assert [d["phase"] for k, d in seen if k == "learn"] == ["begins", "audit", "step", "step", "gate"]
    assert seen[-1][1]["feedback"] == [given["id"]] and seen[-1][1]["answers"]
