"""A Chromium for the tests of pages: the system's own, driven by playwright, with no background traffic of its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

PATIENCE = 180_000  # milliseconds; a machine with two busy cores takes its time, and no test asserts one
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def find() -> str:
    """The path of the browser. Its absence is a failure that says what to do, never a skip."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    raise AssertionError(
        f"no browser ({', '.join(NAMES)}) on PATH; tests marked `browser` need one: apt-get install -y chromium"
    )


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find(), args=list(FLAGS), timeout=PATIENCE)
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page, and all that it asked for or complained about."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))


@contextmanager
def opened(browser: Browser, path: Path, **context: Any) -> Iterator[Watched]:
    """``path`` from file:// in a fresh context (viewport, color_scheme, … as playwright names them)."""
    with browser.new_context(**context) as fresh:
        fresh.set_default_timeout(PATIENCE)
        watched = Watched(fresh.new_page())
        watched.page.goto(path.resolve().as_uri())
        yield watched
