"""The pictures of the report in docs/images, from a run folder: python scripts/report_images.py runs/quickstart-…

Needs the system's Chromium and playwright (both are there after `make test-integrations` in CI).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from earnest.report import write
from tests.report.browser import chromium, opened

IMAGES = Path(__file__).parents[1] / "docs" / "images"
DESK = {"width": 1040, "height": 920}
PHONE = {"width": 375, "height": 920}


def main(run_dir: str) -> None:
    page = write(run_dir)
    IMAGES.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        for name, size, scheme in (("light", DESK, "light"), ("dark", DESK, "dark"), ("phone", PHONE, "light")):
            with opened(browser, page, viewport=size, color_scheme=scheme, device_scale_factor=1.5) as watched:
                path = IMAGES / f"report-{name}.png"
                watched.page.screenshot(path=path)
                print(f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
