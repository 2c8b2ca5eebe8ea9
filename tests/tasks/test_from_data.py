"""A task of the user's own: ``my_task.py:Name``, and a file of questions with a grader; GRPO trains on both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from earnest import runs
from earnest.config import dump, from_mapping, recipes
from earnest.config.text import parse
from earnest.data.reading import DataError
from earnest.errors import ConfigError, EarnestError
from earnest.runs.errors import RunStopped
from earnest.tasks import PromptStream, Task, TaskError, get_task

TASK = """
from dataclasses import dataclass
from earnest.runs.errors import RunStopped
from earnest.tasks import Grade, Prompt

@dataclass(frozen=True)
class Echo:
    word: str = "yes"
    name = "echo"
    description = "say one word"
    def prompts(self, split, count, seed):
        asked = ({"role": "user", "content": self.word},)
        return [Prompt(f"{split}:{i}", asked, {"answer": self.word}) for i in range(count)]
    def grade(self, prompt, completion):
        return Grade(float(completion == self.word), "", completion == self.word)

class NoTask:
    name = "none"
    def grade(self, prompt, completion): ...

made = Echo("no")
"""

REWARDS = """
def score(row, completion):
    wanted, given = row["answer"].split(), completion.split()
    return sum(a == b for a, b in zip(given, wanted)) / len(wanted) - 0.01 * abs(len(given) - len(wanted))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_task.py").write_text(TASK)
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [
        {"question": p.messages[-1]["content"], "answer": p.data["answer"], "level": i}
        for i, p in enumerate(get_task("sort").prompts("train", 60, 0))
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def graded(folder: Path, **more: object) -> Task:
    columns = {"prompt": "question"}
    return get_task("graded", {"train": str(folder / "questions.jsonl"), "columns": columns, "grade": "exact"} | more)


def test_a_class_or_an_instance_of_a_file(folder: Path) -> None:
    place = folder / "my_task.py"
    assert get_task(f"{place}:Echo").prompts("train", 1, 0)[0].data["answer"] == "yes"
    assert get_task(f"{place}:Echo", {"word": "hm"}).prompts("train", 1, 0)[0].data["answer"] == "hm"
    assert get_task(f"{place}:made").prompts("train", 1, 0)[0].data["answer"] == "no"


@pytest.mark.parametrize(
    ("name", "given", "sentence"),
    [
        ("my_task.py:Eco", {}, "has no 'Eco'; did you mean 'Echo'"),
        ("my_task.py:NoTask", {}, "is no task: it has no description and no prompts. A task has name"),
        ("my_task.py", {}, r"is a file; add the name of the task in it, as in .*my_task.py:MyTask"),
        ("your_task.py:Echo", {}, "task: there is no file .*your_task.py"),
        ("my_task.py:Echo", {"words": 1}, "cannot be made with the settings .*words"),
        ("my_task.py:made", {"word": "a"}, "task.word: .* is an instance and has no settings"),
    ],
)
def test_a_wrong_place_is_one_sentence(folder: Path, name: str, given: dict[str, object], sentence: str) -> None:
    with pytest.raises(EarnestError, match=sentence) as caught:
        get_task(f"{folder}/{name}", given)
    assert "\n" not in str(caught.value)


def test_modules_are_places_too() -> None:
    with pytest.raises(ConfigError, match="task: no_such_package cannot be imported"):
        get_task("no_such_package:Task")
    with pytest.raises(TaskError, match="json:dumps is no task"):
        get_task("json:dumps")


def test_the_rows_of_a_file_in_two_splits(folder: Path) -> None:
    task = graded(folder, heldout=0.3)
    train, held = task.prompts("train", 30, 0), task.prompts("heldout", 10, 0)
    texts = {p.messages[-1]["content"] for p in train}
    assert len(texts) == 30, "no row comes twice before all have come once"
    assert not texts & {p.messages[-1]["content"] for p in held}
    assert train == task.prompts("train", 30, 0) != task.prompts("train", 30, 1)
    assert set(train[0].data) == {"prompt", "answer", "level"}, "the grader gets the whole row"
    assert task.grade(train[0], str(train[0].data["answer"])).correct
    assert isinstance(task, Task) and task.name == "questions" and "held out" in task.description
    stream = PromptStream(task, seed=3)
    assert stream.next(2) + stream.next(3) == PromptStream(task, seed=3).next(5)
    assert len(task.prompts("heldout", 100, 0)) == 100, "a small split is repeated"


def test_mistakes_in_the_data_are_one_sentence(folder: Path) -> None:
    with pytest.raises(TaskError, match=r"none of the 60 rows of .* is held out; raise data.heldout"):
        graded(folder, heldout=0.0).prompts("heldout", 1, 0)
    with pytest.raises(EarnestError, match=r"data.holdout: unknown key; did you mean 'heldout'"):
        graded(folder, holdout=0.1)
    (folder / "pairs.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(
        EarnestError, match=r"grade needs rows of prompt and answer, and .*pairs.jsonl has rows of another"
    ):
        get_task("graded", {"train": str(folder / "pairs.jsonl"), "grade": "exact"})
    with pytest.raises(EarnestError, match="grade: is required"):
        get_task("graded", {"train": str(folder / "questions.jsonl")})


def test_a_grader_of_ones_own_needs_no_answer(folder: Path) -> None:
    path = folder / "open.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"Describe the {noun}.", "noun": noun}) + "\n" for noun in "abcdefgh")
    )
    (folder / "short.py").write_text("def score(row, completion):\n    return float(row['noun'] in completion)\n")
    settings = {"train": str(path), "heldout": 0.2}
    task = get_task("graded", settings | {"grade": f"{folder / 'short.py'}:score"})
    prompt = task.prompts("train", 1, 0)[0]
    assert task.grade(prompt, f"it is {prompt.data['noun']}").reward == 1.0
    assert get_task("graded", settings | {"grade": {"kind": "regex", "pattern": "^It"}})
    for grade in ("exact", "numeric", "contains", "json", {"kind": "regex", "pattern": "(a)"}, ["exact"]):
        with pytest.raises(DataError, match=r"have none \(columns prompt, noun\); name it with data.columns.answer"):
            get_task("graded", settings | {"grade": grade})


RECIPE = """
adapter: {kind: lora}
data: {train: questions.jsonl, columns: {prompt: question}, heldout: 0.2}
grade: [{kind: 'rewards.py:score', weight: 0.5}, exact]
objective: [{kind: grpo}]
steps: 2
shares_every: 0
sampling: {prompts_per_step: 2, completions_per_prompt: 4, max_new_tokens: 8}
eval: {prompts: 4, samples: 2}
"""


def test_grpo_trains_on_a_file_and_a_function(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "mine.yaml").write_text(RECIPE)
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")  # files beside the recipe are found from any folder
    name, data = recipes.read(str(folder / "mine.yaml"))
    config = from_mapping(data, [f"out={folder / 'run'}"])
    assert from_mapping(parse(dump(config), "config")).task == config.task, "a resumed run has the same task"
    runs.start(name, config, Console(quiet=True))
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {"grade/score", "grade/exact"} <= {key for line in lines for key in line.get("metrics", line)}
    assert json.loads((folder / "run" / "run.json").read_text())["task"] == "questions"
    events = (folder / "run" / "events.log").read_text()
    assert "the grader of questions" not in events, "a sound grader gives no warning"
    resumed = runs.resume(folder / "run", ["steps=3"], Console(quiet=True))
    assert resumed is not None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["data=null"], "grade: grades the rows of a file"),
        (["task=sort"], "task: data and grade are the task already; leave task out, or set task=null"),
        (["data=3"], "data: must be a file or a mapping with train, got 3"),
    ],
)
def test_data_and_grade_go_together(folder: Path, changes: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        from_mapping(parse(RECIPE, "recipe"), changes)


def test_a_task_of_ones_own_in_a_recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "mine.yaml").write_text(
        "task: {name: 'my_task.py:Echo', word: ok}\nadapter: {kind: lora}\nobjective: [{kind: grpo}]\nsteps: 1\n"
    )
    monkeypatch.chdir(Path(__file__).parent)
    config = from_mapping(recipes.read(str(folder / "mine.yaml"))[1])
    assert config.task.name == f"{folder.resolve() / 'my_task.py'}:Echo"
    assert get_task(config.task.name, config.task.fields).prompts("train", 1, 0)[0].data["answer"] == "ok"


def test_a_run_warns_of_what_its_grader_pays_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.yaml").write_text(RECIPE)
    data = recipes.read(str(folder / "mine.yaml"))[1]
    grade = f"grade=[contains, {{kind: {folder}/rewards.py:score, weight: 0.1}}]"
    changes = [grade, f"out={folder / 'run'}", "steps=1"]
    runs.start("mine", from_mapping(data, changes), Console())
    warning = "the grader of questions, every answer: a list of all answers gets credit"
    assert "prompt questions/train/" in (folder / "run" / "events.log").read_text()
    assert warning in (folder / "run" / "events.log").read_text()
    assert warning in " ".join(capsys.readouterr().out.split())


def test_a_grader_that_always_raises_stops_the_run_before_it_trains(folder: Path) -> None:
    (folder / "broken.py").write_text("def score(row, completion):\n    return row['nope']\n")
    data = parse(RECIPE, "recipe") | {"grade": f"{folder}/broken.py:score"}
    changes = [f"out={folder / 'run'}", f"data.train={folder}/questions.jsonl", "max_grader_errors=1.0"]
    with pytest.raises(RunStopped) as stopped:
        runs.start("mine", from_mapping(data, changes), Console(quiet=True))
    text = str(stopped.value)
    assert (
        "before its first step" in text and "raises on every completion" in text and "prompt questions/train/" in text
    )
    assert f"KeyError('nope') ({folder.resolve()}/broken.py:2, in score)" in text
    assert not (folder / "run" / "metrics.jsonl").exists() or not (folder / "run" / "metrics.jsonl").read_text()
