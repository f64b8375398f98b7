"""check_site.py finds what it is there to find, in a page with every mistake that it knows."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import check_site

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, which `make site-check` installs")
CHROMIUM = next(filter(None, map(shutil.which, check_site.CHROMIUM)), None)

# With no host that answers: what is asked of another is a mistake in itself.
PAGE = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width"><body>
<img src="missing.png"><img src="http://192.0.2.1/foreign.png" loading="lazy">
<div style="width: 600px">wide</div>
<div class="highlight"><pre><code>no button</code></pre></div>
<div class="highlight"><pre><button class="md-clipboard" onclick="navigator.clipboard.writeText('other')"></button
><code>right</code></pre></div>
<a href="gone.html">a link</a>
<input class="md-search__input">
<script>console.error("said"); throw new Error("thrown")</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
def test_every_mistake_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_site, "SEARCH_S", 1)
    site = tmp_path / "site"
    site.mkdir()
    (site / "index.html").write_text(PAGE)
    (site / "lonely.html").write_text("<!doctype html><p>nobody links here, and no phone is thought of")
    wrong = check_site.check(site, tmp_path / "pictures", str(CHROMIUM), playwright.sync_playwright)
    for expected in (
        "index.html (desktop): 404: ",
        "index.html (desktop): failed: http://192.0.2.1/foreign.png: ",
        "index.html (desktop): from elsewhere: http://192.0.2.1/",
        "index.html (desktop): image does not show: ",
        "index.html (desktop): console: said",
        "index.html (desktop): script: thrown",
        "index.html (desktop): no copy button: no button",
        'index.html (desktop): copied "other" of right',
        "index.html (phone): too wide: DIV wide",
        "search: nothing was found",
        "lonely.html (phone): too wide: page of 980 in 390",
        "lonely.html: no page links to it",
        "gone.html: linked, and not there",
    ):
        assert any(each.startswith(expected) for each in wrong), (expected, wrong)
    assert not [each for each in wrong if each.startswith("lonely.html (desktop)")]
    assert (tmp_path / "pictures" / "phone" / "index.png").exists()
