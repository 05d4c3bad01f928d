"""Every page of the site in a browser, on a wide and on a narrow screen.

Needs playwright (`pip install playwright`) and Chromium (`apt install chromium`). With `SITE_SHOTS=DIR` the screenshots
are kept in DIR.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_docs import site  # noqa: F401 (a fixture)

pytestmark = pytest.mark.slow
api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
WIDTHS = (1280, 400)  # pixels
# Elements that reach beyond the screen and don't scroll on their own; broken pictures; links to nowhere in the page.
FAULTS = """() => {
    const faults = [], root = document.documentElement, width = root.clientWidth;
    if (root.scrollWidth > width) {
        const scrolls = x => x && x !== root &&
            (/(auto|scroll|hidden)/.test(getComputedStyle(x).overflowX) || scrolls(x.parentElement));
        for (const x of document.body.querySelectorAll("*"))
            if (x.getBoundingClientRect().right > width + 1 && !scrolls(x))
                faults.push(`${x.tagName} reaches ${x.getBoundingClientRect().right} of ${width}: ` +
                    x.textContent.trim().slice(0, 60));
    }
    for (const x of document.images) {
        if (!x.complete || !x.naturalWidth) faults.push(`picture ${x.src}`);
        if (!x.alt) faults.push(`picture without words: ${x.src}`);
    }
    for (const x of document.querySelectorAll("a[href^='#']")) {
        const name = decodeURIComponent(x.getAttribute("href").slice(1));
        if (name && !document.getElementById(name)) faults.push(`link to #${name}`);
    }
    return faults;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_pages_fit_the_screen(site: Path, browser, width: int, tmp_path: Path) -> None:  # noqa: F811
    shots = Path(os.environ.get("SITE_SHOTS", tmp_path))
    page = browser.new_page(viewport={"width": width, "height": 900})
    wide, found = tmp_path / "wide.html", {}
    wide.write_text("<div style='width: 2000px'>long</div><img src='none.png' alt='a'><a href='#none'>b</a>", "utf-8")
    page.goto(wide.as_uri())
    assert [fault.split()[0] for fault in page.evaluate(FAULTS)] == ["DIV", "picture", "link"]
    for path in sorted(site.rglob("*.html")):
        page.goto(path.as_uri(), wait_until="load")
        name = str(path.relative_to(site))
        if faults := page.evaluate(FAULTS):
            found[name] = faults
        page.screenshot(path=shots / f"{name.replace('/', '-').removesuffix('.html')}-{width}.png", full_page=True)
    page.close()
    assert not found
