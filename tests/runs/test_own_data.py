"""A run on the user's own file: which rows a step gets, in which order, what is evaluated, what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import earnest as en
from earnest.cli import main
from earnest.config import RunConfig, dump, from_mapping
from earnest.data.dataset import DataSettings
from earnest.data.reading import DataError
from earnest.errors import CheckpointError, ConfigError, EarnestError
from earnest.replay import pairs as files
from earnest.runs import resume, start
from earnest.runs.collect import BatchSource
from earnest.runs.measure import measure
from earnest.runs.own_data import OwnData
from earnest.runs.setup import Setup, build
from tests.replay.records import call, pair

Make = Callable[..., RunConfig]
DPO = "objective=[{kind: dpo}]"
SFT = "objective=[{kind: sft}]"
N = 30


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Answers with and without an exclamation mark; which is chosen is the same in every pair."""
    made = [pair(f"yes {i}!", f"no {i}.", prompt=f"say {i}", trace=f"t{i}") for i in range(N)]
    files.write(tmp_path / "pairs.parquet", made, {})
    return tmp_path / "pairs.parquet"


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    """40 conversations of two turns, in JSON lines."""
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": talk(i)}) + "\n" for i in range(40)))
    return path


def talk(i: int) -> list[dict[str, str]]:
    said = [("user", f"say {i}"), ("assistant", f"yes {i}!"), ("user", "and now?"), ("assistant", "yes again!")]
    return [{"role": role, "content": content} for role, content in said]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


# --- pairs ------------------------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_a_step_has_the_files_rows_chosen_before_rejected(make_config: Make, data: Path) -> None:
    setup = pairs_of(make_config, data)
    found = BatchSource(setup).next(1)
    batch = found.batch
    assert found.attempts == () and batch.behaviour is None, "nothing is sampled for pairs of a file"
    assert batch.role == ("chosen", "rejected") * 2 and batch.pair.tolist() == [0, 0, 1, 1]
    assert batch.correct is not None and batch.correct.tolist() == [True, False] * 2
    text = [setup.policy.decode(batch.targets[r][batch.weight[r] != 0].tolist()) for r in range(4)]
    for chosen, rejected in zip(text[::2], text[1::2], strict=True):
        assert chosen.startswith("yes") and chosen.endswith("!") and rejected == chosen.replace("yes", "no")[:-1] + "."
    last = [int(batch.targets[r][batch.weight[r] != 0][-1]) for r in range(4)]
    assert set(last) <= setup.policy.eos_ids, "an answer learns to stop"


def pairs_of(make_config: Make, data: Path, *more: str) -> Setup:
    return build(make_config(DPO, f"data={{train: {data}, heldout: 0.2}}", *more), lambda _: None)


def own(setup: Setup) -> OwnData:
    assert setup.data is not None
    return setup.data


@pytest.mark.integration
def test_the_order_is_an_epoch_without_repetition_and_the_seeds(make_config: Make, data: Path) -> None:
    rows = own(pairs_of(make_config, data))
    size = rows.dataset.size("train")
    order = [[rows.index(0, "train", epoch * size + i) for i in range(size)] for epoch in (0, 1)]
    assert sorted(order[0]) == sorted(order[1]) == list(range(size)) and order[0] != order[1]
    steps = [row for step in (1, 2, 3) for row in rows.rows(0, "train", step, 2)]
    by_hand = [rows.dataset.rendered(rows.dataset.at("train", i)) for i in order[0][:6]]
    assert [row.prompt + row.tokens for row in steps] == [r.tokens for pair in by_hand for r in pair]
    for seed, purpose in ((1, "train"), (0, "check")):
        assert [rows.index(seed, purpose, i) for i in range(size)] != order[0]


def test_turns_of_one_conversation_are_on_the_same_side(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    with path.open("w") as out:
        for i in range(60):
            for turns in (2, 4):
                row = {"prompt": [*talk(i)[: turns - 1]], "chosen": "a", "rejected": "b"}
                out.write(json.dumps(row) + "\n")
    found = OwnData.load(DataSettings(train=str(path), heldout=0.3), en.load("nano"), lambda _: None).dataset
    sides = [{e.prompt[0]["content"] for e in found.examples(side)} for side in ("train", "heldout")]
    assert sides[0] and sides[1] and not sides[0] & sides[1]


@pytest.mark.integration
def test_accuracy_and_margin_by_hand(make_config: Make, data: Path) -> None:
    """Against the model's own logits, one answer at a time."""
    setup = pairs_of(make_config, data)
    rows = own(setup)

    def mean(tokens: tuple[int, ...], start: int) -> float:
        with torch.no_grad():
            logits = setup.policy.model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)  # type: ignore[attr-defined]
        return sum(float(logits[i - 1, tokens[i]]) for i in range(start, len(tokens))) / (len(tokens) - start)

    rendered = [rows.dataset.rendered(e) for e in rows.dataset.examples("heldout")]
    margins = [mean(c.tokens, c.prompt_length) - mean(r.tokens, r.prompt_length) for c, r in rendered]
    found = rows.measure(setup.engine, 100)
    assert found is not None and len(margins) > 1
    assert found.metrics["pairs/margin"] == pytest.approx(sum(margins) / len(margins), rel=1e-4)
    assert found.metrics["pairs/accuracy"] == sum(m > 0 for m in margins) / len(margins)
    assert found.metrics["pairs/margin_se"] == pytest.approx(
        torch.tensor(margins, dtype=torch.float64).std().item() / math.sqrt(len(margins)), rel=1e-3
    )


@pytest.mark.integration
def test_a_run_prefers_what_was_chosen_and_records_its_file(
    tmp_path: Path, make_config: Make, quiet: Console, data: Path
) -> None:
    options = (
        "steps=12",
        "sampling.prompts_per_step=8",
        "eval.every=0",
        "optimizer.lr=0.02",
        f"out={tmp_path / 'run'}",
    )
    config = make_config(DPO, f"data={{train: {data}, heldout: 0.2}}", *options)
    folder = start("test", config, quiet).folder
    before, after = (x["metrics"] for x in lines(folder) if x["kind"] == "eval")
    assert after["pairs/margin"] > before["pairs/margin"] + 0.1
    steps = [x for x in lines(folder) if x["kind"] == "step"]
    assert all("reward" not in x for x in steps) and steps[-1]["loss"] < steps[0]["loss"] == pytest.approx(
        0.6931, abs=1e-3
    )
    header = json.loads((folder / "run.json").read_text())["data"]
    assert header["train"] + header["heldout"] == header["rows"] == N and header["too_long"] == 0

    files.write(data, [pair("other", prompt=f"say {i}", trace="x") for i in range(N)], {})
    with pytest.raises(CheckpointError, match=r"has changed since .* began; use the same rows"):
        resume(folder, ["steps=13"], quiet)


@pytest.mark.integration
def test_pairs_that_do_not_fit_need_a_choice(make_config: Make, data: Path) -> None:
    long = [pair("word " * 60, prompt=f"long {i}", trace=f"t{i}") for i in range(5)]
    short = [pair("short", prompt=f"say {i}", trace=f"s{i}") for i in range(N)]
    files.write(data, [*long, *short], {})
    with pytest.raises(DataError, match=r"5 of 35 rows cannot be trained on:\n.*the limit is 128; set data.too_long"):
        pairs_of(make_config, data)
    said: list[str] = []
    setup = build(make_config(DPO, f"data={{train: {data}, too_long: skip}}"), said.append)
    assert own(setup).describe()["too_long"] == 5 and any("5 too long" in line for line in said)


@pytest.mark.integration
def test_tool_calls_of_replayed_pairs_are_rendered(data: Path) -> None:
    policy = en.load("nano")
    tool = {"type": "function", "function": {"name": "clock", "parameters": {"properties": {"city": {}}}}}
    files.write(data, [replace(pair("x", trace="t9"), chosen=call("clock", city="Paris"), tools=(tool,))], {})
    rows = OwnData.load(DataSettings(train=str(data), heldout=0.0), policy, lambda _: None)
    chosen, _ = rows.rows(0, "train", 1, 1)
    assert policy.decode(chosen.tokens) == '<tool_call>{"name": "clock", "arguments": {"city": "Paris"}}</tool_call>'
    assert "Tools: clock(city)" in policy.decode(chosen.prompt)


@pytest.mark.integration
def test_rollouts_and_pairs_of_a_file_share_a_batch(make_config: Make, data: Path) -> None:
    setup = build(make_config("objective=[{kind: grpo}, {kind: dpo}]", f"data={data}"), lambda _: None)
    found = BatchSource(setup).next(1)
    assert found.batch.role == ("rollout",) * 8 + ("chosen", "rejected") * 2 and len(found.attempts) == 8
    assert found.batch.behaviour is not None and found.batch.advantages is not None


@pytest.mark.integration
def test_a_run_on_pairs_needs_no_task_and_measures_accuracy(
    tmp_path: Path, make_config: Make, quiet: Console, data: Path
) -> None:
    config = make_config(DPO, "task=null", f"data={{train: {data}, heldout: 0.2}}", "steps=2", f"out={tmp_path / 'r'}")
    done = start("test", config, quiet)
    evaluations = [x for x in lines(done.folder) if x["kind"] == "eval"]
    assert [x["measure"] for x in evaluations] == ["accuracy"] * 2 and done.measure == "accuracy"
    assert evaluations[0]["accuracy"] == evaluations[0]["metrics"]["pairs/accuracy"] and "reward" not in evaluations[0]


# --- demonstrations ---------------------------------------------------------------------------------------------------


def demonstrations(make_config: Make, talks: Path, *more: str) -> RunConfig:
    return make_config(SFT, "task=null", f"data={{train: {talks}, heldout: 0.2}}", *more)


def test_the_trained_tokens_are_exactly_those_of_the_rendered_rows(make_config: Make, talks: Path) -> None:
    """Two turns: the user's second message lies between trained tokens and has weight 0."""
    setup = build(demonstrations(make_config, talks), lambda _: None)
    rows, batch = own(setup), BatchSource(setup).next(1).batch
    assert batch.role == ("demonstration",) * 2
    for r in range(2):
        (rendered,) = rows.dataset.rendered(rows.dataset.at("train", rows.index(0, "train", r)))
        length = batch.lengths[r] + 1
        assert [*batch.inputs[r, :1].tolist(), *batch.targets[r, : length - 1].tolist()] == list(rendered.tokens)
        assert [False, *(batch.weight[r, : length - 1] != 0).tolist()] == list(rendered.trained)
        assert 0 < sum(rendered.trained) < length - rendered.prompt_length, "some later tokens are not trained"


def test_held_out_loss_by_hand(make_config: Make, talks: Path) -> None:
    """Against the model's own logits; the standard error against that of a ratio of two means."""
    setup = build(demonstrations(make_config, talks), lambda _: None)
    sums, counts = [], []
    for example in own(setup).dataset.examples("heldout"):
        (row,) = own(setup).dataset.rendered(example)
        with torch.no_grad():
            lp = setup.policy.model(torch.tensor([row.tokens])).logits[0].double().log_softmax(-1)  # type: ignore[attr-defined]
        sums.append(-sum(float(lp[i - 1, t]) for i, t in enumerate(row.tokens) if row.trained[i]))
        counts.append(sum(row.trained))
    found = own(setup).measure(setup.engine, 100)
    assert found is not None and len(sums) > 2 and len(set(counts)) > 1
    n, loss = len(sums), sum(sums) / sum(counts)
    assert found.metrics["heldout/loss"] == pytest.approx(loss, rel=1e-4)
    assert found.metrics["heldout/perplexity"] == pytest.approx(math.exp(loss), rel=1e-3)
    residual = sum((s - loss * t) ** 2 for s, t in zip(sums, counts, strict=True))
    spread = math.sqrt(n / (n - 1) * residual) / sum(counts)
    from earnest.runs.comparison import standard_error

    assert sum(found.parts) / n == pytest.approx(loss, rel=1e-4)
    assert standard_error(found.parts) == pytest.approx(spread, rel=1e-3)


def test_a_run_on_conversations_lowers_their_held_out_loss(
    tmp_path: Path, make_config: Make, quiet: Console, talks: Path
) -> None:
    options = ("model=nano", "steps=6", "eval.every=3", "optimizer.lr=5e-3", "sampling.prompts_per_step=8")
    done = start("own", demonstrations(make_config, talks, *options, f"out={tmp_path / 'run'}"), quiet)
    first, middle, last = (x for x in lines(done.folder) if x["kind"] == "eval")
    assert last["loss"] < middle["loss"] < first["loss"] - 0.1 and done.after == last["loss"]
    assert first["se"] > 0 and first["metrics"]["heldout/perplexity"] == pytest.approx(math.exp(first["loss"]))
    header = json.loads((done.folder / "run.json").read_text())
    assert header["task"] == "talks.jsonl" and header["data"]["layout"] == "conversations"
    assert header["data"]["rows"] == 40 and header["data"]["bad"] == header["data"]["leaked"] == 0
    page = (done.folder / "report.html").read_text()
    assert "Held-out loss in nats per trained token" in page and "40 rows of" in page
    assert "Held-out reward" not in page and "Mean reward" not in page and "in the file: yes" in page
    printed = quiet.file.getvalue()  # type: ignore[attr-defined]
    assert "held-out loss" in printed and "perplexity" in printed and "reward" not in printed


def test_a_resumed_run_equals_one_that_was_not_stopped(
    tmp_path: Path, make_config: Make, quiet: Console, talks: Path
) -> None:
    options = ("sampling.prompts_per_step=9", "checkpoint.every=2", "eval.every=0")  # an epoch ends inside step 4
    whole = start("a", demonstrations(make_config, talks, *options, "steps=5", f"out={tmp_path / 'a'}"), quiet)
    part = start("b", demonstrations(make_config, talks, *options, "steps=2", f"out={tmp_path / 'b'}"), quiet)
    again = resume(part.folder, ["steps=5"], quiet)
    losses = [[x["loss"] for x in lines(run.folder) if x["kind"] == "step"] for run in (whole, again)]
    assert losses[0] == losses[1] and len(losses[0]) == 5
    assert whole.after == again.after


def test_a_task_beside_own_demonstrations_keeps_its_reward(make_config: Make, talks: Path) -> None:
    from earnest.runs.evaluate import evaluate

    config = make_config("objective=[{kind: grpo}, {kind: sft}]", f"data={{train: {talks}, heldout: 0.2}}")
    setup = build(config, lambda _: None)
    batch = BatchSource(setup).next(1).batch
    assert batch.role == ("rollout",) * 8 + ("demonstration",) * 2
    assert batch.behaviour is not None and batch.behaviour.shape[0] == batch.active.shape[0]
    line = evaluate(setup, 0).record(0.0)
    assert "reward" in line and "measure" not in line and line["metrics"]["heldout/loss"] > 0


def test_the_samples_are_the_users_rows_with_their_own_numbers(
    tmp_path: Path, make_config: Make, quiet: Console, talks: Path
) -> None:
    """Each held-out row has its loss before and after, and the file's answer."""
    options = ("steps=4", "eval.every=0", "optimizer.lr=0.02", "sampling.prompts_per_step=8", "samples.heldout=100")
    options += ("eval.prompts=64", "sampling.max_new_tokens=1")
    config = demonstrations(make_config, talks, *options, f"out={tmp_path / 'run'}")
    setup = build(config, lambda _: None)
    folder = start("own", config, quiet).folder
    shown = [json.loads(text) for text in (folder / "samples.jsonl").read_text().splitlines()]
    before, after = ([x for x in shown if x["phase"] == phase] for phase in ("before", "after"))
    held = [e.prompt[0]["content"] for e in own(setup).dataset.examples("heldout")]
    assert [x["prompt"][0]["content"] for x in before] == held == [x["prompt"][0]["content"] for x in after]
    dataset = own(setup).dataset
    longest = max(sum(r.trained) for e in dataset.examples("heldout") for r in dataset.rendered(e))
    assert max(x["tokens"] for x in before) == longest > 1, "a sample is as long as the file's answers"
    assert any(x["cut_off"] for x in before) and all(x["cut_off"] or x["tokens"] <= longest for x in before)
    found = own(setup).measure(setup.engine, 64)
    assert found is not None and [x["loss"] for x in before] == pytest.approx(list(found.each))
    first = next(x for x in lines(folder) if x["kind"] == "eval")
    assert first["metrics"]["heldout/loss_se"] == pytest.approx(first["se"])
    assert first["metrics"]["heldout/perplexity_se"] == pytest.approx(first["se"] * math.exp(first["loss"]))
    better = sum(a["loss"] < b["loss"] for b, a in zip(before, after, strict=True))
    page = (folder / "report.html").read_text()
    assert f"{longest} tokens, cut off" in page
    assert f"{better} better, {len(before) - better} worse, 0 with the same loss" in page and better > 0
    assert "All numbers of the evaluations" in page and "held-out: heldout/perplexity" in page
    rows = [x for x in shown if x["phase"] == "train"]
    first_row = own(setup).dataset.at("train", 0)
    (rendered,) = own(setup).dataset.rendered(first_row)
    assert len(rows) == 8 and rows[0]["prompt_id"] == "training row 1" and "training row 8" in page
    trained = [x for x in rows[0]["segments"] if x["author"] == "data"]
    assert sum(x["tokens"] for x in trained) == sum(rendered.trained)
    assert trained[0]["text"].startswith(str(first_row.reply[0]["content"]))
    assert sum(x["tokens"] for x in rows[0]["segments"]) == len(rendered)


def test_a_plain_text_is_completed_from_its_first_half(tmp_path: Path, make_config: Make, quiet: Console) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"the number {i} is a number"}) + "\n" for i in range(20)))
    config = make_config(SFT, "task=null", f"data={{train: {path}, heldout: 0.2}}", "steps=1", f"out={tmp_path / 'r'}")
    folder = start("own", config, quiet).folder
    shown = json.loads((folder / "samples.jsonl").read_text().splitlines()[0])
    assert shown["prompt"][0]["content"].startswith("the number") and shown["loss"] > 0
    assert shown["feedback"].startswith("in the file: ") and "number" in shown["feedback"]


def test_further_tasks_are_measured_beside_the_users_rows(
    tmp_path: Path, make_config: Make, quiet: Console, talks: Path
) -> None:
    """The further task's numbers equal those of a run on that task with the same settings."""
    settings = ("steps=2", "eval={every: 1, prompts: 3, samples: 2, task: style/volume}", f"out={tmp_path / 'run'}")
    folder = start("own", demonstrations(make_config, talks, *settings), quiet).folder
    evaluations = [x for x in lines(folder) if x["kind"] == "eval"]
    assert [x["step"] for x in evaluations] == [0, 1, 2] and all(x["measure"] == "loss" for x in evaluations)
    from earnest.runs.evaluate import evaluate

    alone = evaluate(build(make_config("eval={every: 2, prompts: 3, samples: 2}"), lambda _: None), 0)
    first = evaluations[0]["metrics"]
    assert first["eval/style/volume/reward"] == alone.value and first["eval/style/volume/reward_se"] == alone.se
    assert "held-out: eval/style/volume/reward" in (folder / "report.html").read_text()
    assert "; style/volume " in quiet.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("task", "message"),
    [("srot", "task 'srot' is unknown"), ("style/volume", "eval.task: style/volume is measured already")],
)
def test_a_further_task_that_cannot_be_measured_is_refused_before_the_folder(
    tmp_path: Path, make_config: Make, quiet: Console, task: str, message: str
) -> None:
    with pytest.raises(EarnestError, match=message):
        start("own", make_config(f"eval.task={task}", f"out={tmp_path / 'run'}"), quiet)
    assert not (tmp_path / "run").exists()


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["rows", "pairs"])
def test_eval_measures_a_run_on_its_own_held_out_rows(
    tmp_path: Path, make_config: Make, quiet: Console, talks: Path, data: Path, kind: str
) -> None:
    out = f"out={tmp_path / 'run'}"
    config = (
        demonstrations(make_config, talks, "steps=2", out)
        if kind == "rows"
        else make_config(DPO, "task=null", f"data={{train: {data}, heldout: 0.2}}", "steps=2", out)
    )
    done = start("own", config, quiet)
    found = measure(done.folder)
    assert found.measure == done.measure == ("loss" if kind == "rows" else "accuracy")
    assert found.before == pytest.approx(done.before) and found.after == pytest.approx(done.after)
    assert found.margin == pytest.approx(done.margin) and found.perplexity == pytest.approx(done.perplexity)
    with pytest.raises(ConfigError, match=r"samples: .* is measured on rows of its file"):
        measure(done.folder, ["samples=3"])
    if kind == "rows":
        talks.write_text("".join(json.dumps({"messages": talk(i)}) + "\n" for i in range(90, 130)))
        with pytest.raises(ConfigError, match=r"talks.jsonl has changed since"):
            measure(done.folder)


# --- the recipe -------------------------------------------------------------------------------------------------------


def test_a_text_and_a_mapping_are_the_same_setting(make_config: Make, talks: Path) -> None:
    short, long = (make_config(SFT, f"data={value}") for value in (talks, f"{{train: {talks}}}"))
    assert short.data == long.data == DataSettings(train=str(talks))
    import yaml

    assert from_mapping(yaml.safe_load(dump(short))).data == short.data
    with pytest.raises(ConfigError, match=r"data\.on_error: must be 'stop' or 'skip', got 'ignore'"):
        make_config(SFT, f"data={{train: {talks}, on_error: ignore}}")


@pytest.mark.integration
def test_what_cannot_be_trained_is_refused(make_config: Make, data: Path, talks: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no term reads the pairs of .*; add a term on preferences"):
        build(make_config(f"data={data}"), lambda _: None)
    with pytest.raises(ConfigError, match=r"no term reads the rows of .*; add a term on them: sft"):
        build(make_config(DPO, f"data={talks}"), lambda _: None)
    with pytest.raises(DataError, match="there is no such file or folder"):
        build(make_config(DPO, "data=nowhere.parquet"), lambda _: None)
    with pytest.raises(ConfigError, match="task: is required; give a task, or your own rows"):
        make_config("task=null")
    with pytest.raises(ConfigError, match="task: is required, because a term of the objective reads rollouts"):
        build(make_config("task=null", f"data={talks}"), lambda _: None)
    with pytest.raises(ConfigError, match=r"reads chosen and rejected rows, and .* has none"):
        build(make_config("objective=[{kind: sft}, {kind: dpo}]", "task=null", f"data={talks}"), lambda _: None)
    with pytest.raises(ConfigError, match=r"data.heldout: 0.0 of .* holds out no row of 40"):
        build(make_config(SFT, "task=null", f"data={{train: {talks}, heldout: 0.0}}"), lambda _: None)
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    with pytest.raises(DataError, match=r"\(columns prompt, answer\) are questions, which no term trains on"):
        build(make_config(SFT, f"data={{train: {questions}, heldout: 0.0}}"), lambda _: None)
    questions.write_text('{"question": "1 + 1?", "answer": "2"}\n')
    mapped = f"data={{train: {questions}, heldout: 0.0, columns: {{prompt: question}}}}"
    with pytest.raises(
        DataError, match=r"data\.columns\.prompt=question data\.columns\.completion=answer; .*give grade=exact"
    ):
        build(make_config(SFT, mapped), lambda _: None)


def test_a_wrong_row_stops_with_exit_2_and_no_folder(
    tmp_path: Path, talks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with talks.open("a") as out:
        out.write('{"messages": [{"role": "assistant", "content": "first"}]}\n')
    place = tmp_path / "run"
    command = ["run", "sft", "task=null", f"data={talks}", f"out={place}", "steps=1"]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 2 and not place.exists()
    said = capsys.readouterr().err
    assert "talks.jsonl, line 41" in said and "1 of 41 rows" in said


def test_training_from_python_on_a_file(tmp_path: Path, tiny: Path, talks: Path, quiet: Console) -> None:
    policy = en.load(str(tiny))
    engine = en.LocalEngine(policy, en.attach(policy, en.LoRA(rank=2), seed=0), en.AdamW(lr=1e-2))
    data = DataSettings(train=str(talks), heldout=0.2)
    done = en.train(engine, None, en.SFT(), steps=2, data=data, out=tmp_path / "run", console=quiet)
    assert done.measure == "loss" and done.after < done.before
