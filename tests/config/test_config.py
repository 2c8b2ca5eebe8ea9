"""A mistake in a recipe is one sentence with the way out; what is accepted is read back as the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from earnest.config import changed_keys, dump, from_mapping, list_recipes, load, load_file, text
from earnest.errors import ConfigError
from scripts.docs.keys import keys, table

MISTAKES = {
    # an unknown key at any depth names the nearest known one
    "stesp=3": "stesp: unknown key; did you mean 'steps'?",
    "optimizer.lrr=1": "optimizer.lrr: unknown key; did you mean 'lr'?",
    "lr=1e-3": "lr: unknown key; did you mean 'optimizer.lr'?",
    "rank=4": "rank: unknown key; did you mean 'adapter.rank'?",
    "temperature=1": "temperature: unknown key; did you mean 'sampling.temperature'?",
    "sampling.temprature=1": "sampling.temprature: unknown key; did you mean 'sampling.temperature'?",
    "objective.0.clp=1": "objective.0.clp: unknown key; did you mean 'clip'?",
    "objective.0.fields={a: 1}": "objective.0.fields: unknown key; ",
    "adapter.rnk=3": "adapter.rnk: unknown key; did you mean 'rank'?",
    "a.b.c=3": "a: unknown key; known: adapter,",
    # a sampler's key without its sampler
    "sampler={count: 4}": "sampler.count: has a meaning only with a bucket, or staleness above 0",
    "sampler={staleness: 1, folder: /x}": "sampler.folder: has a meaning only with a server at sampler.url",
    "sync={signers: [abc]}": "'abc' is not a public key",
    # wrong types: nothing is converted in silence
    "steps=2.5": "steps: must be a whole number, got 2.5.",
    "steps=many": "steps: must be a whole number, got 'many'.",
    "steps=": "steps: must be a whole number, got None.",
    "seed=true": "seed: must be a whole number, got True.",
    "check=1": "check: must be true or false, got 1.",
    "task=3": "task: must be a text, got 3.",
    "adapter.rank=x": "adapter.rank: must be a whole number at least 1, got 'x'.",
    "optimizer.lr=fast": "optimizer.lr: must be a finite number at least 0, got 'fast'.",
    "optimizer.betas=[0.9]": "optimizer.betas: must be a list of 2 finite numbers at least 0 and below 1, got [0.9]",
    "objective.0.weight=x": "objective.0.weight: must be a number, got 'x'.",
    "objective.0.clip=abc": "objective.0.clip: must be a finite number above 0 and at most 1, got 'abc'",
    "sampling=3": "sampling: must be a mapping of keys to values, got 3.",
    "adapter=lora": "adapter: must be a mapping of keys to values, got 'lora'.",
    "objective.0=3": "objective.0: must be a mapping of keys to values, got 3.",
    "steps.x=3": "steps.x=3: steps is 40, which has no keys inside.",
    # out of range
    "steps=0": "steps: must be at least 1, got 0.",
    "sampling.temperature=-1": "sampling.temperature: must be above 0, got -1.",
    "objective.0.weight=.nan": "objective.0.weight: must be a finite number, got nan.",
    "max_grader_errors=2": "max_grader_errors: must be at most 1, got 2.",
    "optimizer.schedule=cosin": "optimizer.schedule.kind: must be 'constant' or 'cosine' or 'linear' or 'wsd', got",
    "optimizer.schedule={kind: wsd, decai: 1}": "optimizer.schedule.decai: unknown key; did you mean 'decay'?",
    "optimizer.schedule={kind: linear, warmup: 1.5}": "optimizer.schedule.warmup: must be a share of the updates below",
    "optimizer.lr=-1": "optimizer.lr: must be a finite number at least 0, got -1",
    "optimizer.max_grad_norm=0": "optimizer.max_grad_norm: must be above 0, got 0.",
    "adapter.rank=0": "adapter.rank: must be a whole number at least 1, got 0",
    # unknown names
    "objective.0.kind=gro": "objective.0: objective 'gro' is unknown: did you mean 'grpo'?",
    "objective.0.kind=ppo": "objective.0: objective 'ppo' is unknown: known: ",
    "objective.0.weight=0": "objective: no term has a weight other than 0 (grpo), so nothing would be trained",
    "adapter.kind=lra": "adapter 'lra' is unknown: did you mean 'lora'?",
    "optimizer.kind=adam": "optimizer: optimizer 'adam' is unknown: did you mean 'adamw'?",
    "loggers=[tensorbord]": "loggers.0: must be 'tensorboard', 'trackio' or 'wandb', got 'tensorbord'",
    "dtype=fp32": "got 'fp32' (did you mean 'float32'?)",
    # empty and contradictory
    "objective=[]": "objective: is empty; give at least 1.",
    "model=''": "model: is empty; give at least 1.",
    "sampler=ftp://gpu": "sampler.url: must match ^((https?|s3|gs|az)://",
    "objective.0={weight: 1}": "objective.0.kind: is required",
    "objective=[{kind: grpo}, {kind: grpo}]": "two terms are called 'grpo'; give one of them a name",
    "objective.1.clip=1": "objective is a list and has the place 0 only, not '1'",
    # not an override at all
    "foo": "'foo' is not an override; write key=value",
    "=3": "'=3' is not an override",
    "a..b=3": "'a..b=3' is not an override",
    "steps={": "steps is not YAML",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("quickstart", [mistake])
    said = str(caught.value)
    assert MISTAKES[mistake] in said
    assert "\n" not in said and "pydantic" not in said


@pytest.mark.parametrize("recipe", [r.name for r in list_recipes() if r.objective])  # an experiment has runs of its own
def test_a_recipe_survives_its_own_dump(recipe: str) -> None:
    _, config = load(recipe)
    again = from_mapping(text.parse(dump(config), "dump"))
    assert again == config and changed_keys(config, again) == []


def test_the_dump_has_every_default() -> None:
    """Whoever changes a default later does not change what an old folder says."""
    data = text.parse(dump(load("quickstart", ["out=here"])[1]), "dump")
    assert "out" not in data, "a folder may be moved"
    assert data["adapter"] == {"kind": "lora", "rank": data["adapter"]["rank"], "alpha": data["adapter"]["alpha"],
                               "rslora": False, "freeze_a": False, "layers": None, "modules_to_save": None,
                               "targets": data["adapter"]["targets"]}  # fmt: skip
    assert data["objective"][0]["clip_high"] is None
    assert data["optimizer"]["betas"] == [0.9, 0.999]


def test_overrides_reach_every_depth_and_the_last_one_wins() -> None:
    overrides = ["seed=3", "optimizer.lr=1e-4", "objective.0.clip=0.3", "adapter.targets=[o_proj]", "seed=4"]
    _, config = load("quickstart", [*overrides, "objective.0.correction={level: token}", "loggers=[tensorboard]"])
    assert config.seed == 4
    assert config.optimizer.build().lr == 1e-4
    term = config.build_objective().terms[0].term
    assert term.clip == 0.3 and term.correction.level == "token"
    assert config.adapter.targets == ["o_proj"]
    assert changed_keys(load("quickstart")[1], config)[:1] == ["adapter.targets"]


def test_the_adapters_rate_is_adamws_only() -> None:
    import earnest as en

    rate = load("quickstart", ["optimizer={kind: adamw}"])[1].optimizer.build().lr
    assert rate == load("quickstart")[1].adapter.build().lr != en.SGD().lr
    assert load("quickstart", ["optimizer={kind: sgd}"])[1].optimizer.build().lr == en.SGD().lr


def test_the_yaml_and_the_python_are_the_same_words() -> None:
    import earnest as en

    objective = "[{kind: grpo, clip: 0.1}, {kind: sft, weight: 0.5, name: shown}]"
    _, config = load("quickstart", [f"objective={objective}"])
    assert config.build_objective() == en.GRPO(clip=0.1) + 0.5 * en.SFT(name="shown")


@given(
    value=st.floats(allow_nan=False, allow_infinity=False), style=st.sampled_from(["{!r}", "{:e}", "{:.3E}", "{:g}"])
)
def test_a_number_is_a_number_however_it_is_written(value: float, style: str) -> None:
    """YAML 1.1 reads 1e-4 as a text, which has trained many a model with a default instead."""
    written = style.format(value)
    assert text.parse(written, "x") == float(written)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1), inner, max_size=3),
        max_leaves=8,
    )
)
@example("0E0").via("a text that YAML 1.2 takes for a number")
@example({"1e-4": "1e5"}).via("as a key, too")
def test_what_is_spelt_is_read_back(data: object) -> None:
    assert text.parse(text.spell({"key": data}), "x") == {"key": data}


def test_a_key_that_stands_twice(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("steps: 3\nseed: 1\nsteps: 4\n")
    with pytest.raises(ConfigError, match=r"r\.yaml: the key 'steps' is given twice \(line 3\); keep one\."):
        load_file(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [("", "is empty"), ("- 1\n", "holds a list"), ("a: [", "is not YAML at line"), ("\xff", "cannot be read")],
)
def test_a_file_that_is_no_recipe(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=says):
        load(str(path))


def test_the_place_of_a_mistake_is_counted_from_one() -> None:
    with pytest.raises(ConfigError, match="at line 2, column 7: mapping values"):
        text.parse("model: nano\n  task: sort\n", "recipe")


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("quikstart", "did you mean 'quickstart'?"),
        ("missing.yaml", "there is no file missing.yaml; give one that exists, or a recipe: "),
        ("some/where", "there is no file some/where"),
        (".", "is a folder, not a recipe"),
    ],
)
def test_a_recipe_that_is_not_there(recipe: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(recipe)
    assert says in str(caught.value)


def test_every_key_has_a_meaning() -> None:
    assert [key for key, _, meaning in keys() if not meaning] == []


def test_the_documented_keys_are_the_keys() -> None:
    page = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
    assert table() in page, "docs/runs.md has another table; write: python -m scripts.docs.keys"


@pytest.mark.parametrize(("kind", "rate"), [("ia3", 5e-3), ("lora", 1e-4)])
def test_without_a_rate_the_adapters_own_is_taken(kind: str, rate: float) -> None:
    from earnest.adapters.variant import get_variant

    given = {"adapter": {"kind": kind}, "task": "sort", "objective": [{"kind": "grpo"}], "steps": 1}
    assert get_variant(kind).lr == rate
    assert from_mapping(given).optimizer.build().lr == rate
    assert from_mapping({**given, "optimizer": {"weight_decay": 0.1}}).optimizer.build().lr == rate
    assert from_mapping({**given, "optimizer": {"lr": 0.5}}).optimizer.build().lr == 0.5


def test_a_recipe_is_read_once_and_its_parts_are_built_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`earnest run` parses the YAML once; the term, adapter and optimizer that it checked are those that train."""
    from earnest import cli
    from earnest.adapters import LoRA
    from earnest.engines import AdamW
    from earnest.objectives import GRPO

    made: list[str] = []

    def count(owner: object, name: str, label: str) -> None:
        original = getattr(owner, name)

        def counted(*arguments: object, **more: object) -> object:
            made.append(label)
            return original(*arguments, **more)

        monkeypatch.setattr(owner, name, counted)

    count(text, "parse_file", "recipe")
    for label, part in {"term": GRPO, "adapter": LoRA, "optimizer": AdamW}.items():
        count(part, "__post_init__", label)
    small = ("check=false", "steps=1", "eval.every=0", "eval.prompts=1", "eval.samples=1", f"out={tmp_path / 'run'}")
    with pytest.raises(SystemExit) as left:
        cli.main(["run", "quickstart", *small])
    assert left.value.code == 0, capsys.readouterr().err
    assert sorted(made) == ["adapter", "optimizer", "recipe", "term"]


def test_a_tasks_settings_survive_the_trip_to_yaml() -> None:
    """A task without settings is a name; with settings it is a mapping, and both read back as they were."""
    given = {"name": "reasoning_gym/chain_sum", "min_terms": 2}
    for written, fields in (("sort", {}), (given, {"min_terms": 2})):
        config = load("quickstart", [f"task={written}"])[1]
        assert config.task.fields == fields and text.parse(dump(config), "dump")["task"] == written
        assert changed_keys(config, from_mapping(text.parse(dump(config), "dump"))) == []


def test_every_replica_has_a_signer() -> None:
    with pytest.raises(ConfigError, match=r"sync\.signers: has 1 public keys for 2 replicas; give one for each"):
        load("quickstart", ["replicas=2", f"sync.signers=[{'ab' * 32}]"])
