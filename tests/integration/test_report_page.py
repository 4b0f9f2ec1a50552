"""The report in a real browser: figures are drawn, nothing is wrong in the console, nothing comes from outside."""

import json
import re
import shutil
import subprocess

import pytest

from medusa_train.eval.report import write_report
from synthetic import synthetic_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MEASURE = """<script>document.title = JSON.stringify({
  figures: [...document.querySelectorAll("figure > svg")].map(svg => {
    const box = svg.getBoundingClientRect();
    return [box.width, box.height, svg.querySelectorAll("path, use").length];
  }),
  width: document.documentElement.scrollWidth, window: window.innerWidth,
})</script>"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome is installed")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_report(folder, synthetic_report())
    return folder / "report.html"


def browse(page, tmp_path, width):
    """The page as the browser has it in the end, and what it told its console."""
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--dump-dom",
            "--enable-logging=stderr", "--v=0", f"--user-data-dir={tmp_path / 'profile'}", f"file://{page}",
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return done.stdout, console


def test_nothing_is_loaded_and_nothing_goes_wrong(report, tmp_path):
    # The page forbids itself whatever is not in it: a request would be an error in the console.
    shown, console = browse(report, tmp_path, 1100)
    assert console == []
    assert "Content-Security-Policy" in shown
    assert "What the figures mean" in shown
    assert re.findall(r'(?:src|href)="(?!#)', shown) == []


def test_a_request_would_be_seen(report, tmp_path):
    page = tmp_path / "foreign.html"
    page.write_text(report.read_text().replace("</body>", '<img src="https://example.invalid/x.png"></body>'))
    assert any("Content Security Policy" in line for line in browse(page, tmp_path, 1100)[1])


@pytest.mark.parametrize("width", [1100, 500])
def test_figures_are_drawn_and_fit(report, tmp_path, width):
    page = tmp_path / "measured.html"
    page.write_text(re.sub("<meta http-equiv[^>]*>", "", report.read_text()).replace("</body>", MEASURE + "</body>"))
    shown, _ = browse(page, tmp_path, width)
    found = json.loads(re.search("<title>(.*?)</title>", shown).group(1))
    assert len(found["figures"]) == 6
    for drawn_width, height, marks in found["figures"]:
        assert min(drawn_width, height) > 100
        assert marks > 5
    assert found["width"] <= found["window"], "nothing is wider than the window"
