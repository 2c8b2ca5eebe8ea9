"""The page: whole, safe, and the same for the same folder."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from earnest.report import ReportError, load, render, summary, write
from earnest.report.laws import tally
from earnest.report.markup import VOID, Html, duration, el, fixed, number, signed
from earnest.report.record import CheckRecord
from earnest.report.watch import WAY_OUT
from tests.report import folders

HOSTILE = "</script ></style><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;<!-- <script "


class Tree(HTMLParser):
    """Elements, attributes and visible text of a page; every element has to be closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data


def poison(value: Any) -> Any:
    """Every text inside, replaced."""
    if isinstance(value, dict):
        return {
            (key if key in KEPT else key + HOSTILE): (entry if key in KEPT else poison(entry))
            for key, entry in value.items()
        }
    if isinstance(value, list):
        return [poison(entry) for entry in value]
    return HOSTILE if isinstance(value, str) else value


KEPT = {"format", "status"}


def test_no_text_of_a_run_can_become_markup(tmp_path):
    """Every text that a run folder can carry is hostile; the page shows that text, and no element comes of it."""
    folder = folders.make(tmp_path, steps=3)
    header = folders.header(3)
    texts = ("recipe", "task", "adapter", "objective", "reason", "started", "updated")
    folders.write_json(
        folder / "run.json", {**header, **dict.fromkeys(texts, HOSTILE), "model": {"name": HOSTILE, "version": HOSTILE}}
    )
    (folder / "config.yaml").write_text(HOSTILE)
    (folder / "events.log").write_text(f"2026 warning {HOSTILE}\n{HOSTILE}\n")
    folders.write_json(folder / "environment.json", poison(folders.ENVIRONMENT))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row["kind"] == "step":
            row["terms"] = {HOSTILE: {**row["terms"]["grpo"], "ran": HOSTILE, "metrics": {HOSTILE: row["step"]}}}
            row |= {
                "skipped": [HOSTILE],
                "idle": {HOSTILE: HOSTILE},
                "passes": HOSTILE,
                "metrics": {HOSTILE: row["step"]},
            }
    folders.write_lines(folder / "metrics.jsonl", rows)
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    told = {"prompt": [{"role": HOSTILE, "content": HOSTILE}], "completion": HOSTILE, "feedback": HOSTILE}
    folders.write_lines(
        folder / "samples.jsonl", [{**s, **told, "prompt_id": s["prompt_id"] + HOSTILE} for s in samples]
    )
    verdict = folders.verdict()
    hurt = dict.fromkeys(("law", "subject", "measured", "expected", "detail"), HOSTILE)
    folders.write_json(
        folder / "verdict.json", {**verdict, "checks": [{**check, **hurt} for check in verdict["checks"]]}
    )

    page = render(load(folder))
    tree = Tree(page)
    assert tree.tags.count("script") == 2
    assert tree.tags.count("style") == 1
    assert "img" not in tree.tags
    assert not [name for _, name, _ in tree.attributes if name.startswith("on")]
    plain = Tree(render(load(folders.make(tmp_path / "plain", steps=3))))
    assert set(tree.tags) == set(plain.tags) | {"aside"} | {"li", "ul"}
    assert tree.text.count(HOSTILE) > 60
    data = json.loads(re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    assert f"{HOSTILE}: loss" in {chart["title"] for chart in data.values()}


def test_nothing_is_loaded_from_anywhere(tmp_path):
    """No address in any attribute, and a policy that forbids every load and every script but our own two texts."""
    page = render(load(folders.make(tmp_path)))
    tree = Tree(page)
    for tag, name, value in tree.attributes:
        assert name not in ("src", "srcset", "action", "style"), (tag, name, value)
        if name == "href":
            assert value is not None
            assert value.startswith("#")
    policy = next(value for tag, name, value in tree.attributes if tag == "meta" and value and "default-src" in value)
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org/2000/svg)|fetch\(|XMLHttpRequest|import\(", page)


def test_every_chart_has_its_data_its_table_and_a_label(tmp_path):
    page = render(load(folders.make(tmp_path)))
    data = json.loads(re.search(r'id="charts">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    places = re.findall(r'data-chart="([^"]+)"', page)
    assert sorted(places) == sorted(data)
    assert page.count("<figure") == page.count('class="numbers"') == len(places)
    for chart in data.values():
        assert f'aria-label="{chart["title"]}, as a table"' in page


def test_links_inside_the_page_lead_somewhere(tmp_path):
    tree = Tree(render(load(folders.make(tmp_path))))
    ids = [value for _, name, value in tree.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    for _, name, value in tree.attributes:
        if name == "href":
            assert value is not None
            assert value[1:] in ids
        if name == "aria-labelledby":
            assert value in ids


def test_the_headline_shows_what_was_measured(tmp_path):
    text = Tree(render(load(folders.make(tmp_path)))).text
    for words in (
        "sort on nano 1.0",
        "0.367 ± 0.021",
        "+0.403 ± 0.030",
        "64 prompts, 256 completions",
        "80 s",
        "6 hold",
    ):
        assert words in text
    assert "grpo(clip=0.2, over=tokens)" in text
    assert "topk_gjs(alpha=0.5, k=100, tail)" in text
    assert "Weight 0, so not computed: kl_barrier." in text
    assert "Never changed: learning rate 0.001" in text
    assert "Worth knowing" not in text


def test_a_broken_law_stands_at_the_top_and_in_the_verdict(tmp_path):
    page = render(load(folders.make(tmp_path, fail=True)))
    text = Tree(page).text
    assert "1 of 6 fail" in text
    why = "The term sdpo adds nothing to the gradient: it trains nothing."
    assert f"broken: GL on term sdpo. {why}" in text
    assert page.index('class="notices"') < page.index('id="reward"')
    assert text.count(why) == 1, "at the top; the verdict refers to it"
    assert 'href="#notices"' in page and "finished, 1 law failed" in text
    assert "badge warn" in page[: page.index("<dt>verdict")], "a run with a broken law is not green"


def test_the_check_before_training_and_the_watch_are_counted_apart(tmp_path):
    folder = folders.make(tmp_path)
    text = Tree(render(load(folder))).text
    assert "before the first step, in 0.4 s: 6 hold (1 more do not apply to this run)." in text
    assert "Over the steps of the training" not in text
    found = folders.verdict()
    failed = {"law": "GL", "subject": "steps during training", "measured": "9 of 60", "expected": "fewer"}
    found["checks"].append(failed | {"outcome": "fails", "detail": f"9 of 60 steps learned nothing. {WAY_OUT}"})
    folders.write_json(folder / "verdict.json", found | {"holds": False})
    warning = f"steps 3 to 5 learned nothing, because the gradient is exactly 0. {WAY_OUT}"
    (folder / "events.log").write_text(f"2026-01-02T03:05:25Z warning {warning}\n" * 2)
    text = Tree(render(load(folder))).text
    assert "6 hold (1 more do not apply to this run). Over the steps of the training: 1 fails." in text
    assert text.count(WAY_OUT) == 1, "once in full, under Worth knowing"
    assert text.count("steps 3 to 5 learned nothing, because the gradient is exactly 0") == 4


def test_the_reason_of_a_failure_is_shown_once(tmp_path):
    """A failed check stands in run.json, events.log and the verdict: the top of the page says it once, in full."""
    detail = "The term sdpo adds nothing to the gradient: it trains nothing."
    reason = f"the training step breaks a law:\n  GL on term sdpo: 0, expected above 0. {detail}"
    folder = folders.make(tmp_path, fail=True, status="failed", reason=reason, steps_done=0)
    (folder / "events.log").write_text(f"2026-01-02T03:05:25Z error failed: {' '.join(reason.split())}\n")
    top = Tree(render(load(folder))).text.split("Mean reward")[0]
    assert "The run failed after 0 of 60 steps (the training step breaks a law)." in top
    assert top.count(detail) == 1
    folders.write_json(folder / "verdict.json", folders.verdict())
    top = Tree(render(load(folder))).text.split("Mean reward")[0]
    assert top.count(detail) == 1, "where no check tells it, the event does"


def test_an_unfinished_run_does_not_call_its_last_measurement_after(tmp_path):
    text = Tree(render(load(folders.make(tmp_path, status="interrupted", reason="SIGINT", steps_done=30)))).text
    assert "so far" in text
    assert "The run was interrupted after 30 of 60 steps (SIGINT); it can be resumed." in text
    assert "30 of 60" in text


def test_idle_steps_are_counted(tmp_path):
    folder = folders.make(tmp_path, steps=3)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    idle = {"idle": {"sdpo": "no failed row"}, "terms": {}, "loss": None, "grad_norm": None, "update_norm": None}
    rows = [{**row, **idle} if row["kind"] == "step" and row["step"] == 2 else row for row in rows]
    folders.write_lines(folder / "metrics.jsonl", rows)
    assert "sdpo had nothing to do on 1 of 3 steps: no failed row" in Tree(render(load(folder))).text


def test_samples_are_complete_and_in_order_and_a_cut_is_reported(tmp_path):
    folder = folders.make(tmp_path, steps=2)
    one = json.loads((folder / "samples.jsonl").read_text().splitlines()[0])
    rows = [
        {**one, "phase": phase, "prompt_id": f"p{index:03d}", "reward": float(reward)}
        for phase, reward in (("before", 0), ("after", 1))
        for index in range(130)
    ]
    rows += [{**one, "phase": "train", "prompt_id": f"t{index:03d}"} for index in range(200)]
    folders.write_lines(folder / "samples.jsonl", rows)
    text = Tree(render(load(folder))).text
    assert "130 better, 0 worse, 0 with the same reward" in text
    assert "The first 100 of 130 are shown; samples.jsonl has all." in text
    shown = re.findall(r"p\d{3}", text)
    assert shown == [f"p{index:03d}" for index in range(100)]
    assert "Training rollouts (60 of 200, evenly)" in text
    rollouts = re.findall(r"t\d{3}", text)
    assert (len(rollouts), rollouts[0], rollouts[-1]) == (60, "t000", "t199")


def test_one_step_and_many(tmp_path):
    page = render(load(folders.make(tmp_path / "one", steps=1)))
    assert "steps drawn as" not in page
    folder = folders.make(tmp_path / "many", steps=900, terms=1)
    page = render(load(folder))
    assert "900 steps drawn as 400 means; the band is each mean" in page
    assert len(page) < 400_000


@pytest.mark.slow
def test_a_hundred_thousand_steps(tmp_path):
    """In a process of its own, as a user has it: the tests' shape checks make every record some times slower."""
    folder = folders.make(tmp_path, steps=100_000)
    subprocess.run([sys.executable, "-c", f"import earnest.report; earnest.report.write({str(folder)!r})"], check=True)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "100,000 steps drawn as 400 means" in page
    assert len(page) < 500_000


def test_write_is_repeatable_and_leaves_nothing_else(tmp_path):
    folder = folders.make(tmp_path / "run", steps=3)
    before = {path.name for path in folder.iterdir()}
    path = write(folder)
    assert path == folder / "report.html"
    first = path.read_bytes()
    assert write(folder, to=tmp_path / "copy.html").read_bytes() == write(folder).read_bytes() == first
    assert {path.name for path in folder.iterdir()} == before | {"report.html"}
    with pytest.raises(ReportError, match=r"missing/x\.html: cannot be written \(No such file or directory\)"):
        write(folder, to=tmp_path / "missing" / "x.html")


def test_summary_for_the_terminal(tmp_path):
    console = Console(width=100)
    with console.capture() as capture:
        console.print(summary(folders.make(tmp_path / "a")))
        console.print(
            summary(
                folders.make(tmp_path / "b", fail=True, task="[red]sort", status="failed", reason="NaN", steps_done=9)
            )
        )
    text = capture.get()
    for words in (
        "0.367 ± 0.021 → 0.770 ± 0.021",
        "+0.403 ± 0.030",
        "6 hold",
        "1 of 6 fail",
        "[red]sort",
        "The run failed after 9 of 60 steps (NaN).",
    ):
        assert words in text


def test_importing_the_report_brings_no_torch():
    code = "import earnest.report, sys; assert not {'torch', 'transformers', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_markup_escapes_by_construction():
    assert (
        el("p", "<b>", el("i", "&"), class_='"x"', hidden=False, title=None)
        == '<p class="&quot;x&quot;">&lt;b&gt;<i>&amp;</i></p>'
    )
    assert isinstance(el("p"), Html)
    assert el("meta", charset="utf-8") == '<meta charset="utf-8">'


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (-0.5, "−0.5"),
        (1 / 3, "0.3333"),
        (64, "64"),
        (1234567, "1,234,567"),
        (1e-8, "1.00e−8"),
        (12345.678, "12,346"),
    ],
)
def test_numbers_are_written_as_a_person_would(value, text):
    assert number(value) == text


def test_times_and_columns():
    assert [duration(s) for s in (0.42, 80.2, 723, 11_100)] == ["0.4 s", "80 s", "12 min 3 s", "3 h 5 min"]
    assert (fixed(0.5), signed(0.25), signed(-0.25)) == ("0.500", "+0.250", "−0.250")


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_colour_of_text_is_readable_in_light_and_dark():
    """WCAG AA, 4.5 : 1, of everything that is ever a text's colour on both of the page's grounds."""
    style = (Path(__file__).parents[2] / "src/earnest/report/assets/page.css").read_text()
    pairs = {
        name: (light, dark) for name, light, dark in re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\)", style)
    }
    for name in ("ink", "soft", "n", "good", "warn", "bad", *(f"c{i}" for i in range(6))):
        for ground in ("paper", "sheet"):
            for theme in (0, 1):
                low, high = sorted((_luminance(pairs[name][theme]), _luminance(pairs[ground][theme])))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (name, ground, ("light", "dark")[theme])


def test_the_tally_names_what_fails_first():
    def shown(*outcomes):
        return str(tally([CheckRecord(law="GL", subject="x", expected="", outcome=o) for o in outcomes]))

    assert ">holds<" in shown("holds") and ">2 hold<" in shown("holds", "holds")
    assert ">1 of 2 fail<" in shown("holds", "fails") and ">1 holds, 1 not declared<" in shown("holds", "not declared")
    assert ">2 hold, 1 warns<" in shown("holds", "warns", "holds")
    assert ">not checked<" in shown()
