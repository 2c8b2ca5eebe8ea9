"""The documentation site is built without a warning and without a dead link, and has its generated pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

import earnest
from earnest.config import RunConfig
from earnest_audit.laws import LAWS
from scripts.docs.pages import ROOT
from tests.report.browser import chromium, opened


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "WARNING" not in done.stdout, done.stdout
    return folder


def _words(page: Path) -> str:
    return unescape(re.sub(r"<[^>]+>", "", page.read_text()))


def test_the_reference_is_complete(site: Path) -> None:
    api = "".join(_words(page) for page in (site / "reference/api").glob("*.html"))
    assert [name for name in earnest.__all__ if name not in api] == []
    keys = _words(site / "reference/recipe.html")
    assert [key for key in RunConfig.model_json_schema()["properties"] if key not in keys] == []
    laws = _words(site / "reference/laws.html")
    assert [law.code for law in LAWS if law.code not in laws] == []
    commands = _words(site / "reference/commands.html")
    assert all(f"earnest {name}" in commands for name in ("run", "audit", "data", "serve", "replay"))


def test_a_block_to_save_has_the_name_of_its_file(site: Path) -> None:
    assert '<span class="filename">shop.py</span>' in (site / "tutorials/agent.html").read_text()


def test_the_laws_of_which_bug_are_links(site: Path) -> None:
    """A link to an anchor that is not there fails the strict build."""
    page = (site / "which-bug.html").read_text()
    assert (
        'href="reference/laws.html#gl-liveness"' in page and len(re.findall(r'href="reference/laws.html#', page)) > 40
    )


def test_no_page_loads_anything_from_the_network(site: Path) -> None:
    """Scripts, styles, fonts and images are files of the site."""
    for page in site.rglob("*.html"):
        loads = re.findall(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=\"(https?://[^\"]+)", page.read_text())
        assert loads == [], page


WIDE = ("index", "choosing", "which-bug", "adapters", "audit-evidence", "audit-readings", "mutation-tests",
        "reference/recipe", "reference/commands")  # fmt: skip
"""Pages with the widest tables."""


@pytest.mark.browser
def test_the_site_reads_and_searches_from_the_disk(site: Path) -> None:
    with chromium() as browser:
        with opened(browser, site / "index.html", viewport={"width": 1280, "height": 900}) as watched:
            watched.page.keyboard.press("/")
            watched.page.keyboard.type("glossary")
            watched.page.locator(".md-search-result__item", has_text="Glossary").first.wait_for()
            assert watched.complaints == [] and [u for u in watched.requests if not u.startswith("file:")] == []
        with opened(browser, site / "index.html", viewport={"width": 375, "height": 812}) as watched:
            for page in WIDE:
                watched.page.goto((site / f"{page}.html").as_uri())
                assert watched.page.evaluate("document.documentElement.scrollWidth") == 375, page
