"""The page in a real browser, from file://: it draws, answers mouse and keyboard, fits a phone, asks for nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from earnest.report import load, write
from tests.report import folders
from tests.report.browser import Watched, chromium, opened

pytestmark = pytest.mark.browser

DESK = {"width": 1100, "height": 900}
PHONE = {"width": 375, "height": 812}
HOSTILE = "</script ><script>alert(1)</script><img src=x onerror=alert(2)><b>bold</b><!-- <script x"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(folders.make(tmp_path_factory.mktemp("run")))


def assert_drawn(watched: Watched, charts: int) -> None:
    """Every chart has a drawing with a curve, no coordinate is NaN, nothing was requested and nothing complained."""
    assert watched.complaints == []
    assert [url for url in watched.requests if not url.startswith("file:")] == []
    assert len(watched.requests) == 1
    drawings = watched.page.eval_on_selector_all("[data-chart]", "boxes => boxes.map(box => box.innerHTML)")
    assert len(drawings) == charts
    for drawing in drawings:
        assert re.search(r'<path class="curve[^"]*" d="M|<circle class="dot', drawing)
        assert "NaN" not in drawing
        assert "Infinity" not in drawing
        assert "undefined" not in drawing


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_it_draws_and_fits(browser, page, scheme, size):
    with opened(browser, page, viewport=size, color_scheme=scheme) as watched:
        assert_drawn(watched, charts=13)
        wide = watched.page.evaluate("document.documentElement.scrollWidth")
        assert wide == size["width"], "the page must not scroll sideways"
        paper = watched.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == {"light": "rgb(253, 252, 250)", "dark": "rgb(21, 23, 26)"}[scheme]


@pytest.mark.parametrize("steps", [1, 2, 900])
def test_it_draws_short_and_long_runs(browser, tmp_path, steps):
    path = write(folders.make(tmp_path, steps=steps))
    with opened(browser, path, viewport=PHONE) as watched:
        assert_drawn(watched, charts=watched.page.locator("figure").count())
        bands = watched.page.locator(".small .band").count()
        assert (bands > 0) == (steps > 400)


def test_a_run_that_has_only_begun_is_a_page_too(browser, tmp_path):
    folders.write_json(tmp_path / "run.json", folders.header(40, status="running", steps_done=0))
    with opened(browser, write(tmp_path), viewport=PHONE) as watched:
        assert_drawn(watched, charts=0)
        assert watched.page.get_by_text("No step is recorded yet.").is_visible()
        assert watched.page.locator("#theme").inner_text() == "theme: auto"


def test_hovering_shows_the_recorded_values_in_every_chart(browser, page):
    """The cursor snaps to a step; each readout then says what metrics.jsonl says for that very step."""
    steps = {step.step: step for step in load(page.parent).steps}
    with opened(browser, page, viewport=DESK) as watched:
        norm = watched.page.locator("figure", has_text="gradient norm")
        norm.locator(".plot").hover(position={"x": 120, "y": 40})
        said = norm.locator(".readout").inner_text()
        step, value = re.fullmatch(r"step (\d+)\s+([\d.]+)", said).groups()  # type: ignore[union-attr]
        recorded = steps[int(step)]
        assert float(value) == pytest.approx(recorded.grad_norm, rel=1e-3)
        share = watched.page.locator("figure", has_text="Share of each term").locator(".readout").inner_text()
        grpo = recorded.terms["grpo"].share
        assert grpo is not None
        assert re.split(r"\s{1,}", share) == [
            "step",
            step,
            "grpo",
            f"{round(100 * grpo)}",
            "%",
            "sdpo",
            f"{100 - round(100 * grpo)}",
            "%",
        ]
        watched.page.mouse.move(5, 5)
        assert norm.locator(".readout").inner_text() == norm.locator("tbody tr:last-child td").text_content()


def test_the_keyboard_alone_reads_a_chart(browser, page):
    first = load(page.parent).evaluations[0]
    steps = load(page.parent).steps
    with opened(browser, page, viewport=DESK) as watched:
        plot = watched.page.locator('[data-chart="reward"]')
        for _ in range(20):
            watched.page.keyboard.press("Tab")
            if plot.evaluate("box => box === document.activeElement"):
                break
        assert plot.evaluate("box => box === document.activeElement"), "a chart is reached with Tab"
        assert plot.get_attribute("role") == "slider"
        watched.page.keyboard.press("Home")
        said = plot.get_attribute("aria-valuetext")
        assert said is not None
        assert said.startswith("step 0: ")
        assert f"held-out {first.reward:.4g} ± 0.021" in said
        watched.page.keyboard.press("End")
        assert (plot.get_attribute("aria-valuetext") or "").startswith(f"step {len(steps)}: ")
        watched.page.keyboard.press("ArrowLeft")
        assert (plot.get_attribute("aria-valuetext") or "").startswith(f"step {len(steps) - 1}: ")
        assert watched.page.locator(".cross").count() == 13, "one cursor in every chart"
        watched.page.keyboard.press("Escape")
        assert watched.page.locator(".cross").count() == 0


def test_the_theme_can_be_chosen(browser, page):
    with opened(browser, page, viewport=DESK, color_scheme="light") as watched:
        button = watched.page.locator("#theme")
        seen = []
        for _ in range(4):
            seen.append((button.inner_text(), watched.page.evaluate("getComputedStyle(document.body).backgroundColor")))
            button.click()
        light, dark = "rgb(253, 252, 250)", "rgb(21, 23, 26)"
        assert seen == [("theme: auto", light), ("theme: light", light), ("theme: dark", dark), ("theme: auto", light)]


def test_samples_can_be_filtered(browser, page):
    with opened(browser, page, viewport=DESK) as watched:
        pairs = watched.page.locator(".pairs > [data-kind]:visible")
        everything = pairs.count()
        assert everything == 8
        counts = {}
        for kind in ("better", "worse", "same"):
            watched.page.locator(f"[data-show={kind}]").click()
            counts[kind] = pairs.count()
            assert set(pairs.evaluate_all("all => all.map(one => one.dataset.kind)")) <= {kind}
            assert watched.page.locator(f"[data-show={kind}] .count").inner_text() == str(counts[kind])
        assert sum(counts.values()) == everything
        watched.page.locator("[data-show=all]").click()
        assert pairs.count() == everything


def test_a_hostile_sample_is_text(browser, tmp_path):
    folder = folders.make(tmp_path, steps=2)
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    folders.write_lines(folder / "samples.jsonl", [{**row, "completion": HOSTILE, "feedback": HOSTILE} for row in rows])
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in metrics:
        if row["kind"] == "step":
            row["metrics"] = {HOSTILE: row["step"]}
    folders.write_lines(folder / "metrics.jsonl", metrics)
    with opened(browser, write(folder), viewport=DESK) as watched:
        dialogs: list[str] = []
        watched.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
        watched.page.reload()
        assert watched.page.locator(".completion").first.inner_text() == HOSTILE
        assert watched.page.locator(".completion *, .feedback *, img").count() == 0
        assert watched.page.get_by_text(HOSTILE).first.is_visible()
        assert (dialogs, watched.complaints) == ([], [])


def test_markup_that_slipped_in_could_not_run(browser, page, tmp_path):
    """The page's own policy stops a foreign script even where escaping had failed."""
    broken = tmp_path / "broken.html"
    text = page.read_text(encoding="utf-8")
    broken.write_text(
        text.replace(
            "<footer>",
            "<footer><script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">",
        )
    )
    with opened(browser, broken, viewport=DESK) as watched:
        assert watched.page.title() == "sort on nano 1.0 · earnest"
        assert len(watched.complaints) >= 2, "the browser says that it refused them"


def test_it_is_readable_without_scripts(browser, page):
    with opened(browser, page, viewport=DESK, java_script_enabled=False) as watched:
        reward = watched.page.locator("figure", has_text="Mean reward")
        reward.locator("summary").click()
        assert reward.locator("table").is_visible()
        assert watched.page.get_by_text("+0.403").is_visible()
        assert not watched.page.locator("#theme").is_visible(), "a button that does nothing is not shown"
