"""Looks at the built site in a real browser: `make site-check`, or

    python tests/site/check_site.py --site site --screenshots build/screenshots

serves the folder on this machine, and opens every page in headless Chromium (driven by playwright) at the width of a
desktop and of a phone. On each page: no failed or foreign request, no error on the console, every image shows, nothing
is wider than the window; and on the desktop the copy button of every block of code copies that code. Search must find
something. Pages that are there but that nothing links to are a mistake too.
Exit code 1: something was found, and is listed. 77: there is no Chromium or no playwright, and it says how to get them.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTHS = {"desktop": (1280, 800), "phone": (390, 844)}
NOT_REACHED = {"404.html"}  # the server shows it, nobody links to it
MISSING = 77
LONG_MS = 60_000  # a page on a busy machine
SEARCH_S = 20

# What is wider than the window, and is not inside of something that scrolls by itself.
OVERFLOWING = """width => {
    if (document.documentElement.scrollWidth <= width) return [];
    const scrolls = each => { for (let up = each; up; up = up.parentElement) {
        if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(up).overflowX)) return true; } return false; };
    return [...document.querySelectorAll('body *')]
        .filter(each => each.getBoundingClientRect().right > width + 1 && !scrolls(each))
        .map(each => each.tagName + ' ' + (each.textContent || '').trim().slice(0, 60)).slice(0, 5)
        .concat(['page of ' + document.documentElement.scrollWidth + ' in ' + width]);
}"""
IMAGES = (
    """() => [...document.images].filter(each => !each.complete || each.naturalWidth === 0).map(each => each.src)"""
)
LINKS = """() => [...document.querySelectorAll('a[href]')].map(each => each.href)"""
# Each block's button is pressed by the page itself: a click of the mouse would have to scroll to it first.
COPIES = """async () => {
    const wrong = [];
    for (const block of document.querySelectorAll('.highlight pre > code')) {
        const button = block.parentElement.querySelector('[data-clipboard-target], .md-clipboard, .md-code__button');
        const code = block.innerText.trimEnd();
        if (!button) { wrong.push('no copy button: ' + code.slice(0, 60)); continue; }
        window.copied = null;
        button.click();
        for (let turn = 0; turn < 100 && window.copied === null; turn++) await new Promise(r => setTimeout(r, 10));
        if ((window.copied || '').trimEnd() !== code)
            wrong.push('copied ' + JSON.stringify((window.copied || '').slice(0, 60)) + ' of ' + code.slice(0, 60));
    }
    return wrong;
}"""
# Headless Chromium has no clipboard that it could be asked for; what the page hands to it is written down.
CLIPBOARD = """
    document.addEventListener('copy', () => {
        const field = document.activeElement;
        window.copied = field && field.value !== undefined
            ? field.value.slice(field.selectionStart, field.selectionEnd) : String(getSelection());
    });
    if (navigator.clipboard) navigator.clipboard.writeText = async text => { window.copied = text; };
"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()


class Visit:
    """One page at one width, and what is wrong with it."""

    def __init__(self, page: Any, base: str) -> None:
        self._page, self._base, self._width = page, base, page.viewport_size["width"]
        self.troubles: list[str] = []
        page.on("console", lambda message: message.type == "error" and self.troubles.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: self.troubles.append(f"script: {error}"))
        page.on("requestfailed", self._look_at_failure)
        page.on("request", self._look_at_request)
        page.on("response", self._look_at_answer)

    def _look_at_request(self, request: Any) -> None:
        if not request.url.startswith((self._base, "data:", "blob:")):
            self.troubles.append(f"from elsewhere: {request.url}")

    def _look_at_failure(self, request: Any) -> None:
        if request.failure != "net::ERR_ABORTED":  # what was still under way when we went on to the next page
            self.troubles.append(f"failed: {request.url}: {request.failure}")

    def _look_at_answer(self, answer: Any) -> None:
        if answer.status >= 400:
            self.troubles.append(f"{answer.status}: {answer.url}")

    def look(self, name: str, *, picture: Path | None, copy: bool) -> set[str]:
        """Opens the page; returns the pages of this site that it links to."""
        self.troubles.clear()
        self._page.goto(self._base + name, wait_until="load", timeout=LONG_MS)
        self._page.evaluate("() => document.querySelectorAll('img').forEach(each => each.loading = 'eager')")
        self._page.wait_for_function("() => [...document.images].every(each => each.complete)", timeout=LONG_MS)
        self.troubles += [f"image does not show: {each}" for each in self._page.evaluate(IMAGES)]
        self.troubles += [f"too wide: {each}" for each in self._page.evaluate(OVERFLOWING, self._width)]
        if picture is not None:
            picture.parent.mkdir(parents=True, exist_ok=True)
            self._page.screenshot(path=picture, full_page=True, timeout=LONG_MS, animations="disabled")
        if copy:
            self._page.wait_for_timeout(100)  # the theme adds its buttons when a block is seen
            self.troubles += self._page.evaluate(COPIES)
        own = urlsplit(self._base)
        found = (urlsplit(urljoin(self._page.url, link)) for link in self._page.evaluate(LINKS))
        return {each.path.lstrip("/") or "index.html" for each in found if each.netloc == own.netloc}

    def search(self, word: str) -> None:
        """Types a word into the search field, which must find something."""
        self.troubles.clear()
        self._page.goto(self._base + "index.html", wait_until="load", timeout=LONG_MS)
        field = self._page.locator("input.md-search__input")
        field.click(timeout=LONG_MS)
        field.press_sequentially(word, delay=20, timeout=LONG_MS)
        found = self._page.locator(".md-search-result__item").first
        for _ in range(SEARCH_S):
            if found.is_visible():
                return
            field.press("Space", timeout=LONG_MS)  # the index may have come after the last letter
            self._page.wait_for_timeout(1000)
        self.troubles.append(f"nothing was found for {word!r}")


def check(site: Path, screenshots: Path, chromium: str, sync_playwright: Any) -> list[str]:
    pages = sorted(str(path.relative_to(site).as_posix()) for path in site.rglob("*.html"))
    if "index.html" not in pages:
        return [f"{site} has no index.html: run `make site` first"]
    shutil.rmtree(screenshots, ignore_errors=True)
    wrong: list[str] = []
    linked = {"index.html"}
    with served(site) as base, sync_playwright() as playwright:
        # Chromium's own sandbox wants rights that containers do not give; the pages are ours.
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for kind, (width, height) in WIDTHS.items():
            context = browser.new_context(viewport={"width": width, "height": height}, is_mobile=kind == "phone")
            context.add_init_script(CLIPBOARD)
            visit = Visit(context.new_page(), base)
            for name in pages:
                picture = None if name.startswith("source/") else screenshots / kind / f"{Path(name).stem}.png"
                linked |= visit.look(name, picture=picture, copy=kind == "desktop")
                wrong += [f"{name} ({kind}): {each}" for each in visit.troubles]
            if kind == "desktop":
                visit.search("quantize")
                wrong += [f"search: {each}" for each in visit.troubles]
            context.close()
        browser.close()
    wrong += [f"{name}: no page links to it" for name in pages if name not in linked | NOT_REACHED]
    wrong += [f"{name}: linked, and not there" for name in sorted(linked) if not (site / name).exists()]
    print(f"{len(pages)} pages at {len(WIDTHS)} widths; screenshots in {screenshots}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Look at the built site in headless Chromium.")
    parser.add_argument("--site", type=Path, default=Path("site"))
    parser.add_argument("--screenshots", type=Path, default=Path("build/screenshots"))
    options = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if chromium is None:
        print("site-check needs Chromium: apt-get install chromium (Debian, Ubuntu)", file=sys.stderr)
        return MISSING
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("site-check needs playwright, to drive Chromium: pip install playwright", file=sys.stderr)
        return MISSING
    wrong = check(options.site, options.screenshots, chromium, sync_playwright)
    for each in wrong:
        print(f"wrong: {each}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
