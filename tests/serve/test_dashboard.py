"""The dashboard in a real Chromium on a real server: chat, feedback, the version that comes of it, the way back."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, expect

import earnest as en
from earnest.serve.keys import new_key
from earnest.serve.rows import StoredCompletion
from tests.report import folders
from tests.report.browser import PATIENCE, Watched, chromium
from tests.serve.conftest import Live, serving
from tests.serve.test_push import files, zipped

pytestmark = pytest.mark.browser

DESK = {"width": 1100, "height": 900}
PHONE = {"width": 375, "height": 812}
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><b>bold</b>"
expect.set_options(timeout=PATIENCE)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@contextmanager
def visiting(browser: Browser, url: str, **context: Any) -> Iterator[Watched]:
    with browser.new_context(**{"viewport": DESK, **context}) as fresh:
        fresh.set_default_timeout(PATIENCE)
        watched = Watched(fresh.new_page())
        watched.page.goto(url)
        yield watched


def assert_quiet(watched: Watched, url: str) -> None:
    """No request left the server's origin, nothing complained, no script was broken."""
    outside = [r for r in watched.requests if not r.startswith((url + "/", "data:", f"blob:{url}"))]
    assert outside == []
    assert watched.complaints == []


def test_chat_feedback_version_rollback(browser: Browser, live: Live, adapter: Any) -> None:
    """The whole way, by keyboard and mouse, while the page only hears of it by server-sent events."""
    name = adapter("page/taught")
    with visiting(browser, live.url) as watched:
        page = watched.page
        expect(page.locator("#live")).to_have_text("live")
        page.select_option("#adapter", name)
        expect(page.locator("#versions-title")).to_have_text(f"Versions of {name}")
        page.fill("#words", "Describe the fox.")
        page.press("#words", "Enter")
        answer = page.locator(".turn.answer").first
        expect(answer.locator(".who")).to_have_text(f"{name}, version 0")
        expect(answer.locator("summary")).to_be_visible()
        answer.locator("summary").click()
        answer.get_by_label("What should be different?").fill("Warmer please.")
        answer.get_by_label("A better answer").fill("Dear friend, the fox is lovely.")
        answer.get_by_role("button", name="Give feedback").click()

        expect(page.locator('[data-version="1"]')).to_contain_text("answers now")
        expect(answer.locator(".fate")).to_contain_text("Version 1 learned from this")
        version = live.get(f"/v1/adapters/{name}/versions/1")
        change = page.locator(".change").first
        expect(change.locator(".before .completion")).to_have_text(version["answers"][0]["before"])
        expect(change.locator(".after .completion")).to_have_text(version["answers"][0]["after"])
        expect(change).to_contain_text("Warmer please.")
        expect(change).to_contain_text("Dear friend, the fox is lovely.")
        row = page.locator('[data-version="1"]')
        expect(row.get_by_text("gate holds")).to_be_visible()
        expect(row.get_by_text("audit holds")).to_be_visible()
        expect(row.get_by_text("gate: 4 checks, 0 failed, 1 not applicable (held-out margin)")).to_be_visible()
        row.locator("summary", has_text="loss, step by step").click()
        expect(row.locator(".plot path.curve")).to_have_attribute("d", re.compile("^M[^N]*$"))
        assert live.state.store.adapter(name).live == 1

        page.locator('[data-version="0"]').get_by_role("button", name="Roll back").click()
        expect(page.locator('[data-version="0"]')).to_contain_text("answers now")
        assert live.state.store.adapter(name).live == 0
        page.locator('[data-version="0"]').get_by_role("button", name="Pin").click()
        expect(page.locator(f'[data-adapter="{name}"]')).to_contain_text("version 0, pinned")
        page.fill("#words", "Describe the fox.")
        page.press("#words", "Enter")
        expect(page.locator(".turn.answer").nth(1).locator(".who")).to_have_text(f"{name}, version 0")
        expect(page.locator("#events")).to_contain_text(f"{name}: rolled back")
        assert_quiet(watched, live.url)


def test_changes_by_other_clients_appear_without_a_reload(browser: Browser, live: Live, adapter: Any) -> None:
    """Feedback by another client, a candidate with the gate's reason, a new adapter: all appear without a reload."""
    name = adapter("page/other", gate={"drift": 1e-6})
    with visiting(browser, live.url) as watched:
        page = watched.page
        expect(page.locator("#live")).to_have_text("live")
        page.get_by_role("button", name=f"Show {name}").click()
        expect(page.locator("#versions-title")).to_have_text(f"Versions of {name}")
        given = live.teach(live.chat(name), thumbs="down", better="The fox is quick.")
        expect(page.locator(f'[data-feedback="{given["id"]}"]')).to_contain_text("The fox is quick.")
        row = page.locator('[data-version="1"]')
        expect(row).to_contain_text("candidate")
        expect(row.locator(".why")).to_contain_text("log-prob drift")
        expect(row.get_by_text("gate fails")).to_be_visible()
        row.get_by_role("button", name="Promote anyway").click()
        expect(row).to_contain_text("answers now")
        assert live.state.store.adapter(name).live == 1
        newer = adapter("page/newer")
        expect(page.locator(f'[data-adapter="{newer}"]')).to_be_visible()
        assert_quiet(watched, live.url)


def test_markup_in_messages_is_shown_as_text(browser: Browser, live: Live, adapter: Any) -> None:
    """Markup in a question, an answer and a feedback shows as what it is; the page's policy is the second lock."""
    name = adapter("page/hostile")
    row = live.state.store.adapter(name)
    said = StoredCompletion(
        "chatcmpl-hostile", 0, name, 0, "chat", [{"role": "user", "content": HOSTILE}], (1, 2), (3,), (-1.0,), 1.0,
        HOSTILE, "stop", row.id,
    )  # fmt: skip
    live.state.store.add_completions([said]).result()
    live.teach({"id": said.id}, text=HOSTILE)
    with visiting(browser, live.url) as watched:
        page = watched.page
        page.get_by_role("button", name=f"Show {name}").click()
        change = page.locator(".change").first
        expect(change.locator(".quote").first).to_have_text(f"“{HOSTILE}”")
        expect(change.locator(".said")).to_have_text(HOSTILE)
        page.fill("#words", HOSTILE)
        page.press("#words", "Enter")
        expect(page.locator(".turn").first.locator(".said")).to_have_text(HOSTILE)
        expect(page.locator(".turn.answer summary")).to_be_visible()
        assert page.locator("main img, main script, main b:text('bold')").count() == 0
        assert page.title() == "earnest serve"
        assert_quiet(watched, live.url)
        page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title=1\">')")
        assert page.title() == "earnest serve"


def test_every_control_works_by_keyboard(browser: Browser, live: Live, adapter: Any) -> None:
    """Tab reaches every control in the order of the page; each has a name and a visible focus; thumbs by Enter."""
    name = adapter("page/keys")
    with visiting(browser, live.url) as watched:
        page = watched.page
        page.select_option("#adapter", name)
        expect(page.locator("#versions-title")).to_have_text(f"Versions of {name}")
        page.focus("#words")
        page.keyboard.type("Hello!")
        page.keyboard.press("Enter")
        expect(page.locator(".turn.answer summary")).to_be_visible()
        thumb = page.get_by_role("button", name="Good answer")
        for _ in range(8):
            page.keyboard.press("Shift+Tab")
            if thumb.evaluate("n => n === document.activeElement"):
                break
        assert thumb.evaluate("n => n === document.activeElement"), "Shift+Tab leads back to the answer's thumbs"
        assert thumb.evaluate("n => getComputedStyle(n).outlineStyle") == "solid"
        page.keyboard.press("Enter")
        expect(thumb).to_have_attribute("aria-pressed", "true")
        assert live.get("/v1/feedback", adapter=name)["data"][0]["thumbs"] == "up"
        unnamed = page.evaluate(
            """() => [...document.querySelectorAll("button, input, select, textarea, a, summary")]
                .filter((n) => n.checkVisibility())
                .filter((n) => !(n.innerText || n.getAttribute("aria-label") || n.labels?.length))
                .map((n) => n.outerHTML)"""
        )
        assert unnamed == []
        mouse_only = "[onclick]:not(button):not(a):not(summary), [tabindex]:not([tabindex='0'])"
        assert page.locator(mouse_only).count() == 0


def test_a_key_is_typed_once_and_never_in_an_address(browser: Browser, tmp_path: Path) -> None:
    key, entry = new_key("alice")
    (tmp_path / "keys.yaml").write_text(f"keys:\n{entry}\n")
    with serving(tmp_path, key, keys=tmp_path / "keys.yaml") as live:
        with visiting(browser, live.url) as watched:
            page = watched.page
            expect(page.locator("#door")).to_be_visible()
            expect(page.locator("#key")).to_be_focused()
            page.fill("#key", "wrong")
            page.keyboard.press("Enter")
            expect(page.locator("#door-note")).to_contain_text("unknown")
            page.fill("#key", key)
            page.keyboard.press("Enter")
            expect(page.locator("#live")).to_have_text("live")
            expect(page.locator('[data-adapter="assistant"]')).to_be_visible()
            page.reload()
            expect(page.locator('[data-adapter="assistant"]')).to_be_visible()
            assert page.locator("#door").is_hidden()
            assert page.evaluate("[localStorage.getItem('earnest-key'), document.cookie]") == [None, ""]
            assert page.evaluate("sessionStorage.getItem('earnest-key')") == key
            assert not any(key in address for address in watched.requests)
            page.get_by_role("button", name="Forget the key").click()
            expect(page.locator("#door")).to_be_visible()
            assert page.evaluate("sessionStorage.length") == 0
        with httpx.Client(base_url=live.url) as nobody:
            assert nobody.get("/").status_code == 200
            assert nobody.get("/v1/runs").status_code == 401


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_it_fits_a_phone_and_has_themes(browser: Browser, live: Live, size: dict[str, int], scheme: str) -> None:
    with visiting(browser, live.url, viewport=size, color_scheme=scheme) as watched:
        page = watched.page
        expect(page.locator("#live")).to_have_text("live")
        expect(page.locator("#health-list")).to_contain_text("nano")
        assert page.evaluate("document.documentElement.scrollWidth") == size["width"], "no scrolling sideways"
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == {"light": "rgb(253, 252, 250)", "dark": "rgb(21, 23, 26)"}[scheme]
        assert_quiet(watched, live.url)


def test_runs_come_from_run_folders(browser: Browser, live: Live) -> None:
    """Curves and verdict of a folder; a broken one has a message; no name leads out of the folder."""
    place = live.state.settings.data / "runs"
    try:
        folders.make(place / "sort-1", steps=12)
        (place / "torn").mkdir()
        (place / "torn" / "run.json").write_text("{")
        listed = {run["name"]: run["status"] for run in live.get("/v1/runs")["data"]}
        assert listed["sort-1"] == "finished" and listed["torn"] == "unreadable"
        for name in ("..", "%2e%2e", "..%2F..%2Fdata", "torn%2F..%2Fsort-1"):
            assert live.http.get(f"/v1/runs/{name}").status_code == 404
        with visiting(browser, live.url) as watched:
            run = watched.page.get_by_role("article", name="sort-1")
            expect(run).to_contain_text("held-out reward")
            run.locator("summary", has_text="curves").click()
            expect(run.locator(".plot path.curve").first).to_have_attribute("d", re.compile("^M"))
            assert "NaN" not in run.inner_html()
            with watched.page.context.expect_page() as opened:
                run.get_by_role("button", name="Open the report").click()
            expect(opened.value.locator("h1")).to_contain_text("sort")
            assert_quiet(watched, live.url)
    finally:
        shutil.rmtree(place)


def test_a_message_that_is_too_long_stays_in_the_box(browser: Browser, live: Live) -> None:
    """And what to do about it is shown beside it; on a phone every section can be reached from the bar."""
    live.state.wait()
    with visiting(browser, live.url, viewport={"width": 390, "height": 844}) as watched:
        page = watched.page
        page.fill("#words", "word " * 900)
        page.click("#send")
        expect(page.locator("#refusal")).to_contain_text("Shorten the prompt")
        assert len(page.input_value("#words")) > 4000 and page.locator(".turn").count() == 0
        assert page.locator(".bar nav a").count() == 6
        for link in page.locator(".bar nav a").all():
            place = link.bounding_box()
            assert place is not None and place["x"] >= 0 and place["x"] + place["width"] <= 390


def test_roll_back_is_for_older_versions_only(browser: Browser, live: Live, adapter: Any) -> None:
    name = adapter("page/older", updates=1)
    for _ in range(2):
        live.learned(live.teach(live.chat(name), text="Too cold."))
    for number in (1, 2):
        live.post(f"/v1/adapters/{name}/promote", {"version": number})
    live.post(f"/v1/adapters/{name}/rollback", {"version": 1})
    with visiting(browser, live.url) as watched:
        page = watched.page
        page.select_option("#adapter", name)
        newer, base = (page.locator(f'#version-list [data-version="{n}"]') for n in (2, 0))
        expect(newer.get_by_role("button", name="Make it live again")).to_be_visible()
        expect(newer.get_by_role("button", name="Roll back")).to_have_count(0)
        expect(base.get_by_role("button", name="Roll back")).to_be_visible()
        tops = page.evaluate(
            "() => [...document.querySelectorAll('#version-curves .plot')].map((n) => n.getBoundingClientRect().top)"
        )
        assert len(tops) == 3 and max(tops) - min(tops) < 1, "the charts of a row are level"


def test_settings_of_a_chat_fork_delete_and_pushes(browser: Browser, live: Live, adapter: Any, tmp_path: Path) -> None:
    """A system prompt and a temperature reach the model; an adapter is forked and deleted; pushes make one line."""
    name = adapter("page/settings")
    live.state.wait()
    pushed = zipped(files(en.attach(en.load("nano"), en.LoRA(rank=1), targets=["q_proj"]).save(tmp_path / "a", "nano")))
    with visiting(browser, live.url) as watched:
        page = watched.page
        page.select_option("#adapter", name)
        page.get_by_text("System prompt").first.click()
        page.fill("#system", "Be brief.")
        page.fill("#temperature", "0.3")
        page.fill("#words", "Hello!")
        with page.expect_request("**/v1/chat/completions") as asked:
            page.press("#words", "Enter")
        body = asked.value.post_data_json
        assert body["temperature"] == 0.3
        assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
        expect(page.locator(".turn.answer summary")).to_be_visible()

        page.once("dialog", lambda dialog: dialog.accept("page/forked"))
        page.get_by_role("button", name="Fork (version 0)").click()
        fork = page.locator('[data-adapter="page/forked"]')
        expect(fork).to_contain_text(f"from {name}")
        page.once("dialog", lambda dialog: dialog.dismiss())
        fork.get_by_role("button", name="Delete page/forked").click()
        assert live.get("/v1/adapters/page/forked")["name"] == "page/forked", "it was not confirmed"
        page.once("dialog", lambda dialog: dialog.accept())
        fork.get_by_role("button", name="Delete page/forked").click()
        expect(fork).to_have_count(0)
        assert live.http.get("/v1/adapters/page/forked").status_code == 404

        for _ in range(3):
            query = {"lora_name": "page/pushed", "load_inplace": True}
            assert live.http.post("/v1/upload_lora_adapter", params=query, content=pushed).status_code == 200
        assert live.http.post("/v1/unload_lora_adapter", json={"lora_name": "page/pushed"}).status_code == 200
        expect(page.locator("#events li").first).to_contain_text("(4 events)")
        expect(page.locator("#events li", has_text="page/pushed")).to_have_count(1)
        assert_quiet(watched, live.url)


def test_words_that_stay_the_same_come_with_the_log_probs_that_moved(
    browser: Browser, live: Live, adapter: Any
) -> None:
    name = adapter("page/same", updates=1, optimizer={"kind": "adamw", "lr": 1e-6})
    live.learned(live.teach(live.chat(name), better="The fox is quick."))
    version = live.get(f"/v1/adapters/{name}/versions/1")
    assert version["answers"][0]["before"] == version["answers"][0]["after"]
    with visiting(browser, live.url) as watched:
        watched.page.select_option("#adapter", name)
        change = watched.page.locator(".change").first
        expect(change.locator(".after .head")).to_contain_text("the same words")
        (role,) = version["metrics"]["logprob_before"]
        expect(change.locator(".moved")).to_contain_text(f"the mean log-probs per token moved: {role} \N{MINUS SIGN}")


def test_failed_feedback_and_buttons_on_a_phone(browser: Browser, live: Live, adapter: Any) -> None:
    """Feedback that could not be learned from is in the headline and in health; Show and Delete do not touch."""
    name = adapter("page/failed")
    assert live.learned(live.teach(live.chat(name), text="x " * 400))["status"] == "failed"
    failed = live.get("/health")["failed_feedback"]
    assert failed >= 1
    with visiting(browser, live.url, viewport=PHONE) as watched:
        page = watched.page
        expect(page.locator("#facts")).to_contain_text(f"{failed} failed")
        expect(page.locator("#health-list")).to_contain_text("feedback that failed")
        expect(page.locator(f'[data-adapter="{name}"]')).to_be_visible()
        apart = page.evaluate(  # in one call: the rows are redrawn with every event
            """(name) => {
                const at = (what) => document.querySelector(`[aria-label="${what} ${name}"]`).getBoundingClientRect();
                const [show, gone] = [at("Show"), at("Delete")];
                return Math.max(gone.left - show.right, gone.top - show.bottom);
            }""",
            name,
        )
        assert apart >= 6, "pixels between the two buttons"
