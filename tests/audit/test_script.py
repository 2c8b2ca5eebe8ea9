"""``earnest audit SCRIPT.py``: a script's own audits, its trainers and its bare loops are judged; the exit code shows
the result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from earnest.cli import main
from earnest_audit.errors import EarnestError
from earnest_audit.executor import PROGRESS
from earnest_audit.frontends.script import audit_script
from earnest_audit.verdict import Finding
from earnest_audit.watching.watcher import OWNED, WATCHED

STEP = """
import sys
from earnest_audit import audit
from tests.audit.steps import {step} as make, {loss} as right

def wrong(model, batch, *args, **settings):
    loss, metrics = right(model, batch, *args, **settings)
    return {value}, metrics

print("hello from", sys.argv[1:])
audit(make(wrong), quick=True)
"""


LOOP = """
import torch
from earnest_audit import watch
from tests.audit.steps import Tiny, sft_loss, sft_step
model, batch = Tiny(0), sft_step().batch
optimizer = torch.optim.AdamW(model.parameters(), lr={rate}, weight_decay=0.0)
with watch(model, optimizer) as w:
    for _ in range(6):
        loss, metrics = sft_loss(model, batch)
        loss.backward()
        w.step(loss, metrics)
        optimizer.step()
        optimizer.zero_grad()
"""


TRAINER = """
import torch
from pathlib import Path
from tests.audit.trainers.cases import plain
plain(Path("{folder}"), 0, torch.float32, []).train()
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path


def test_a_good_script_exits_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, STEP.format(step="sft_step", loss="sft_loss", value="loss"))
    words, places = list(sys.argv), list(sys.path)
    with pytest.raises(SystemExit) as end:
        main(["audit", str(path), "--json", "lr=3"])
    out, err = capsys.readouterr()
    assert end.value.code == 0 and sys.argv == words and sys.path == places, "as before the script ran"
    assert json.loads(out)["holds"] and "hello from ['lr=3']" in err


def test_a_broken_one_exits_with_1_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, STEP.format(step="sft_step", loss="sft_loss", value="loss * 0.0"))
    with pytest.raises(SystemExit) as end:
        main(["audit", str(path)])
    assert end.value.code == 1 and "The step trains nothing" in capsys.readouterr().out


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_trainer_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import Trainer

    own = Trainer.__init__
    verdict = audit_script(script(tmp_path, TRAINER.format(folder=tmp_path)), quick=True)
    assert verdict.holds, str(verdict)
    assert {"MI", "GL", "IG"} <= {f.law for f in verdict.findings if f.outcome == "holds"}
    assert Trainer.__init__ is own
    assert capsys.readouterr().err.count("`.verdict()` has the rows.") == 1, "one line at the end of training"
    asked = [f.meaning for f in verdict.findings if "Declare" in f.meaning]
    assert asked and all(text.startswith("Of a Trainer this is not known. In audit(Step(…)): ") for text in asked)


@pytest.mark.filterwarnings("ignore::earnest_audit.WatchWarning")
def test_a_bare_loop_under_watch_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codes = []
    for number, rate in enumerate(("1e-3", "1e-30")):
        place = tmp_path / str(number)
        place.mkdir()
        with pytest.raises(SystemExit) as end:
            main(["audit", str(script(place, LOOP.format(rate=rate))), "--json"])
        codes.append(end.value.code)
        verdict = json.loads(capsys.readouterr().out)
        assert verdict["holds"] == (number == 0), verdict
    assert codes == [0, 1] and not WATCHED, "an update that rounds away is seen by the watch alone"


BARE = LOOP.replace("from earnest_audit import watch\n", "").replace("with watch(model, optimizer) as w:", "if True:")


BARE = BARE.replace("        w.step(loss, metrics)\n", "")


@pytest.mark.filterwarnings("ignore::earnest_audit.WatchWarning")
@pytest.mark.parametrize(("rate", "code"), [("1e-3", 0), ("1e-30", 1)])
def test_a_bare_loop_is_watched_by_itself(
    rate: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script without a trainer, an audit or a watch: its optimizer is watched from its first step on."""
    assert "watch" not in BARE
    with pytest.raises(SystemExit) as end:
        main(["audit", str(script(tmp_path, BARE.format(rate=rate))), "--json"])
    out, _ = capsys.readouterr()
    verdict = json.loads(out)
    assert end.value.code == code and verdict["holds"] == (code == 0), verdict
    assert any(f["subject"] == "the parameters' bits" for f in verdict["findings"]) and not WATCHED


def test_steps_that_an_audit_makes_are_not_watched(tmp_path: Path) -> None:
    path = script(tmp_path, STEP.format(step="sft_step", loss="sft_loss", value="loss"))
    verdict = audit_script(path)
    assert not any("looks" in f.measured for f in verdict.findings), str(verdict)


def test_a_script_without_transformers_imports_none_of_it(tmp_path: Path) -> None:
    """Its import prints warnings of torchao and of torch's pytree before the script's own output."""
    path = script(tmp_path, BARE.format(rate="1e-3") + "\nimport sys\nprint('transformers.trainer' in sys.modules)\n")
    done = subprocess.run([sys.executable, "-m", "earnest.cli", "audit", str(path), "--json"], capture_output=True,
                          text=True, check=True)  # fmt: skip
    assert done.stderr.strip() == "False" and json.loads(done.stdout)["holds"]


@pytest.mark.filterwarnings("ignore::earnest_audit.WatchWarning")
@pytest.mark.parametrize("calls", [1, 6, 40])
def test_a_loop_that_never_steps_does_not_exit_with_0(
    calls: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = LOOP.format(rate="1e-3").replace("        optimizer.step()\n", "").replace("range(6)", f"range({calls})")
    text = text.replace("w.step(loss, metrics)", "w.step(loss, metrics, mask=torch.eye(2))")
    with pytest.raises(SystemExit) as end:
        main(["audit", str(script(tmp_path, text))])
    out = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 1 and f"{calls} calls of w.step" in out, out


def test_progress_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, STEP.format(step="sft_step", loss="sft_loss", value="loss"))
    told: list[str] = []
    assert audit_script(path, progress=told.append).holds
    assert told[0].startswith("law 1/") and "liveness" in told[0] and not PROGRESS
    with pytest.raises(SystemExit):
        main(["audit", str(path)])
    assert "GL liveness …" in capsys.readouterr().err


def stopped(folder: Path, text: str) -> Finding:
    """The one row of a script that left nothing to judge."""
    verdict = audit_script(script(folder, text))
    (row,) = verdict.findings
    assert row.law == "AUDIT" and row.outcome == "fails" and not verdict.holds
    return row


def test_what_cannot_be_judged_says_so(tmp_path: Path) -> None:
    nothing = stopped(tmp_path, "x = 1").meaning
    assert "trained nothing: it made no transformers.Trainer, stepped no optimizer and called no audit(Step(" in nothing
    assert "with watch(model, optimizer)" in nothing
    assert stopped(tmp_path, "import sys; sys.exit(3)").measured == "ended with 3"
    assert stopped(tmp_path, "x = 1\nraise OSError('no')").place.endswith("train.py:2")
    with pytest.raises(EarnestError, match="there is no script"):
        audit_script(tmp_path / "none.py")


def test_an_exception_of_any_class_ends_in_a_row(tmp_path: Path) -> None:
    verdict = audit_script(
        script(tmp_path, LOOP.format(rate=1e-2) + "class Stop(BaseException): pass\nraise Stop('now')\n")
    )
    assert [f.measured for f in verdict.failures] == ["raised Stop"] and "now" in verdict.failures[0].meaning


def test_nothing_to_audit_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["audit"])
    assert end.value.code == 2 and "give something to audit" in capsys.readouterr().err


STRAYS = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.backbone(x)))

torch.manual_seed(0)
model, judge = Model(), nn.Linear(1, 1)
{before}
optimizers = [torch.optim.SGD(p, lr=0.1) for p in ({owned})]
for _ in range(8):
    loss = model(torch.randn(4, 3)).square().mean(){more}
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
"""
HEAD, ALL = "model.head.parameters(),", "model.parameters(),"
JUDGED = " + judge(model(torch.randn(4, 3))).mean()"


@pytest.mark.filterwarnings("ignore::earnest_audit.WatchWarning")
@pytest.mark.parametrize(
    ("owned", "before", "more", "outcome"),
    [
        (ALL, "", "", None),
        (HEAD, "", "", "fails"),
        (HEAD, "model.backbone.requires_grad_(False)", "", None),
        (HEAD + "model.backbone.parameters()", "", "", None),
        (HEAD, "model(torch.randn(4, 3)).sum().backward(); model.backbone.requires_grad_(False)", "", None),
        (ALL, "", JUDGED, "not declared"),
        (ALL, "judge.requires_grad_(False)", JUDGED, None),
    ],
    ids=["all", "forgotten", "frozen", "two optimizers", "an old gradient", "a judge", "a frozen judge"],
)
def test_parameters_that_no_optimizer_has(
    owned: str, before: str, more: str, outcome: str | None, tmp_path: Path
) -> None:
    """The module that the optimizer owns whole is the head; the backbone beside it is found among all modules."""
    verdict = audit_script(script(tmp_path, STRAYS.format(owned=owned, before=before, more=more)))
    rows = [f for f in verdict.findings if f.subject == "parameters without an optimizer"]
    assert [f.outcome for f in rows] == ([outcome] if outcome else []), str(verdict)
    assert verdict.holds == (outcome != "fails")
    if rows:
        assert ("Model.backbone.weight" if outcome == "fails" else "Linear.weight") in rows[0].meaning
        line = 1 + STRAYS.splitlines().index("        optimizer.step()")
        assert rows[0].place.endswith(f"train.py:{line}"), "the line that steps the optimizer"


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("hole.py:score", "hole.py:score is no task but a function: a recipe names it as the grader of its rows"),
        ("RUN", "RUN is a run folder: `earnest report RUN` shows its verdict, and `earnest audit RUN/config.yaml`"),
    ],
)
def test_what_is_not_audited_by_this_name_has_a_way_out(
    word: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hole.py").write_text("def score(prompt, completion):\n    return 1.0\n")
    (tmp_path / "RUN").mkdir()
    (tmp_path / "RUN/run.json").write_text("{}")
    with pytest.raises(SystemExit) as end:
        main(["audit", word])
    assert end.value.code == 2 and sentence in capsys.readouterr().err


REPLACED = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))

def main():
    torch.manual_seed(0)
    model = Model()
    early = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.head = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if {late} else early
    for _ in range(12):
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        model.zero_grad()

main()
"""


@pytest.mark.filterwarnings("ignore::earnest_audit.WatchWarning")
@pytest.mark.parametrize("late", [True, False])
def test_a_layer_that_is_replaced_after_the_optimizer_was_made(late: bool, tmp_path: Path) -> None:
    """What the optimizer owns is watched, and the new layer is reported although its model is gone at the end."""
    verdict = audit_script(script(tmp_path, REPLACED.format(late=late)))
    assert verdict.holds == late, str(verdict)
    assert late or [f.subject for f in verdict.failures] == [OWNED]
    assert late or verdict.failures[-1].meaning.startswith("head.weight, head.bias get a gradient")
    (own,) = [f for f in verdict.findings if f.subject.endswith("trainable parameters")]
    assert own.subject.startswith("6") and own.outcome == "holds"


@pytest.mark.filterwarnings("ignore::earnest_audit.WatchWarning")
def test_an_optimizer_of_two_models_is_watched(tmp_path: Path) -> None:
    """No module has all of its parameters."""
    text = """
import torch
one, two = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW([*one.parameters(), *two.parameters()], lr={rate}, weight_decay=0.0)
for _ in range(6):
    two(one(torch.randn(4, 3))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    assert audit_script(script(tmp_path, text.format(rate=1e-2))).holds
    found = audit_script(script(tmp_path, text.format(rate=1e-30)))
    assert [f.subject for f in found.failures] == ["the parameters' bits"] and "4 param" in found.failures[0].measured


def test_optimizers_that_own_no_module_are_not_said_to_be_missing(tmp_path: Path) -> None:
    text = "import torch\np = torch.ones(2, requires_grad=True)\ntorch.optim.SGD([p], lr=0.1).step()"
    row = stopped(tmp_path, text)
    assert "stepped only optimizers that own no module's parameter and called no audit" in row.meaning


def test_a_watched_script_asks_for_nothing_that_it_cannot_give(tmp_path: Path) -> None:
    """There is no `w` in it, so one row says what is not seen."""
    text = str(audit_script(script(tmp_path, BARE.format(rate="1e-3"))))
    assert "Declare" not in text and "Not seen from outside the loop: terms, supervised share" in text
    text = str(audit_script(script(tmp_path, LOOP.format(rate="1e-3"))))
    assert "Declare w.terms(" in text and "Not seen from outside" not in text
