"""What a run leaves behind is usable: by earnest, by PEFT's own Auto classes, and by `earnest eval`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

import earnest as en
from earnest import cli
from earnest.chat import Chat
from earnest.config import RunConfig, load_file
from earnest.errors import EarnestError
from earnest.runs import start
from earnest.runs.measure import measure
from tests.runs.compare import lines
from tests.runs.tiny import TEMPLATE, recipe, tiny_folder

Make = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run. Do not write into it."""
    place = tmp_path_factory.mktemp("trained")
    model = tiny_folder(place / "tiny")
    more = ["optimizer.lr=0.3", "eval.prompts=6", "eval.samples=3", "eval.every=0", f"out={place / 'run'}"]
    return start("test", load_file(recipe(place / "r.yaml", model), more), Console(quiet=True)).folder


def test_load_adapter_reads_a_run_folder(folder: Path) -> None:
    first, second = (en.load_adapter(en.load(folder.parent / "tiny"), place) for place in (folder, folder / "adapter"))
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
    with pytest.raises(EarnestError, match=r"holds no adapter_config.json, nor does .*checkpoints/adapter"):
        en.load_adapter(en.load(folder.parent / "tiny"), folder / "checkpoints")


@pytest.mark.integration
def test_pefts_auto_class_reads_the_adapter_with_its_base(folder: Path) -> None:
    """The base is named by a place that transformers can load, and the logits are earnest's."""
    from peft import AutoPeftModelForCausalLM

    theirs = AutoPeftModelForCausalLM.from_pretrained(str(folder / "adapter"))
    policy = en.load(folder.parent / "tiny")
    en.load_adapter(policy, folder)
    ids = torch.tensor([[6, 7, 8, 9]])
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, policy.model(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_built_in_model_is_named_twice(tmp_path: Path) -> None:
    """PEFT gets the folder of nano, which no hub has; earnest gets its name, which holds on every machine."""
    policy = en.load("nano")
    folder = en.attach(policy, en.LoRA(rank=2)).save(tmp_path / "adapter", base_model="nano")
    named = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert Path(named, "config.json").is_file()
    assert json.loads((folder / "earnest_adapter.json").read_text())["base_model"] == "nano"
    assert Chat(adapter=folder).policy.name == "nano"


def test_a_hub_id_stays_a_hub_id(tmp_path: Path) -> None:
    folder = en.attach(en.load("nano"), en.LoRA(rank=2)).save(tmp_path / "adapter", base_model="someone/model")
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "someone/model"


def test_chat_opens_an_adapter_that_peft_has_no_form_for(tiny: Path, tmp_path: Path) -> None:
    policy = en.load(tiny)
    folder = en.attach(policy, en.ROAD(group=4)).save(tmp_path / "adapter", base_model=str(tiny))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).unlink(missing_ok=True)
    config = json.loads((folder / "earnest_adapter.json").read_text())
    (folder / "earnest_adapter.json").write_text(json.dumps({**config, "peft_sha256": None}))
    assert Chat(adapter=folder).answer("hello") is not None


# --- earnest eval RUN -------------------------------------------------------------------------------------------------


def test_eval_of_a_run_is_the_runs_own_evaluation(folder: Path) -> None:
    """Same prompts, same seeds, same numbers; before is the base, after the adapter."""
    first, last = [line for line in lines(folder / "metrics.jsonl") if line["kind"] == "eval"]
    found = measure(folder)
    assert (found.before, found.after) == (first["reward"], last["reward"]) and found.before != found.after
    assert (found.after_se, found.prompts, found.samples) == (last["se"], 6, 18)


def test_eval_of_a_run_from_python(tiny: Path, tmp_path: Path, quiet: Console) -> None:
    """Its config has no task and no model; the folder and the adapter name them."""
    policy = en.load(tiny)
    engine = en.LocalEngine(policy, en.attach(policy, en.LoRA(rank=2)), en.AdamW(lr=0.3))
    small = {"sampling": {"prompts_per_step": 2, "max_new_tokens": 8}, "eval": {"prompts": 4, "samples": 2}}
    done = en.train(engine, "style/volume", en.GRPO(), steps=2, out=tmp_path / "run", console=quiet, **small)
    found = measure(done.folder)
    assert (found.before, found.after, found.samples) == (done.before, done.after, 8)


def test_eval_on_another_task_with_other_sizes(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as left:
        cli.main(["eval", str(folder), "task=style/warmth", "prompts=5", "samples=2", "max_new_tokens=4"])
    out = capsys.readouterr().out
    assert left.value.code == 0 and "style/warmth" in out and "5 prompts, 10 completions" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["prompt=3"], "prompt: unknown key; did you mean 'prompts'?"),
        (["task=srot"], "task 'srot' is unknown"),
        (["--rounds", "2"], "options of `feedback loops against a server` have no meaning for a run folder"),
    ],
)
def test_mistakes_in_eval(words: list[str], says: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["eval", str(folder), *words])
    assert left.value.code == 2 and says in capsys.readouterr().err


def test_eval_needs_a_folder_before_its_keys_and_an_adapter_needs_a_task(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, says in (
        (["task=sort"], "give the run folder first"),
        ([str(folder / "adapter")], "give task=NAME"),
        (["nowhere"], "nowhere: there is no such run folder or file of preferences"),
        ([str(folder / "config.yaml"), "task=sort"], "key=value belongs to a run folder"),
    ):
        with pytest.raises(SystemExit) as left:
            cli.main(["eval", *words])
        assert left.value.code == 2 and says in capsys.readouterr().err


# --- a chat template by recipe ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_file", [False, True])
def test_a_base_model_trains_with_the_recipes_chat_template(
    as_file: bool, tiny: Path, tmp_path: Path, quiet: Console
) -> None:
    """The run folder and the adapter carry the template: resuming, chatting and measuring need nothing else."""
    base = tmp_path / "base"
    shutil.copytree(tiny, base)
    (base / "chat_template.jinja").unlink()
    given = TEMPLATE
    if as_file:
        (tmp_path / "mine.jinja").write_text(TEMPLATE)
        given = str(tmp_path / "mine.jinja")
    config = load_file(recipe(tmp_path / "r.yaml", base, chat_template=given), ["steps=1", f"out={tmp_path / 'run'}"])
    run = start("test", config, quiet).folder
    assert load_file(run / "config.yaml").chat_template == TEMPLATE
    assert Chat(adapter=run).policy.render([{"role": "user", "content": "hi"}])
    assert measure(run, ["prompts=2", "samples=1"]).prompts == 2


def test_a_chat_template_that_is_no_file(make_config: Make) -> None:
    with pytest.raises(EarnestError, match=r"chat_template: 'mine.jinja' is neither a Jinja template nor a file"):
        make_config("chat_template=mine.jinja")
