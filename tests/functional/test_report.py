"""The report page in headless Chromium: it draws and listens, complains of nothing, asks the network for nothing."""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import run_to_end
from report_run import write_run

from titanlite.features.report.page import main

STEPS = 60
TIMEOUT_S = 120  # 4 s on 2 idle cores
# What Chromium itself asks for at its start, whatever the page.
BROWSER_HOSTS = re.compile(r"https?://([a-z0-9-]+\.)*(google|googleapis|gvt1|gstatic)\.com[:/]")
NOTICE = "setting log level to"  # Bokeh's, at its start

# Put into a copy of the page, in a frame as wide as a phone: what a reader does, and what the page says to it.
PROBE = """
const seen = {};
const all = (root, selector) => [...root.querySelectorAll("*")].flatMap((node) =>
  [...node.matches(selector) ? [node] : [], ...node.shadowRoot ? all(node.shadowRoot, selector) : []]);
const canvas = (name) => all(document.getElementById("plot-" + name), ".bk-events")[0];
const move = (name, x, y) => {
  const box = canvas(name).getBoundingClientRect();
  const at = {clientX: box.left + x * box.width, clientY: box.top + y * box.height, bubbles: true, composed: true,
    pointerType: "mouse", isPrimary: true, pointerId: 1};
  canvas(name).dispatchEvent(new PointerEvent("pointermove", at));
  canvas(name).dispatchEvent(new MouseEvent("mousemove", at));
};
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const until = async (holds) => { for (let i = 0; i < 100 && !holds(); i++) await wait(50); };
addEventListener("load", async () => {
  const figures = document.querySelectorAll("figure").length;
  await until(() => all(document, ".bk-events").length >= figures);
  await wait(500);
  for (const name of ["loss", "time", "ranks", "expert_load"]) {
    const before = new Set(all(document, ".bk-Tooltip"));
    move(name, 0.6, 0.4);
    await wait(150);
    const tips = all(document, ".bk-Tooltip").filter((node) => !before.has(node));
    const cells = tips.flatMap((node) => all(node.shadowRoot, "[class^=bk-tooltip-row]"));
    seen[name] = cells.map((cell) => cell.textContent.trim()).join(" ");
  }
  const [page] = Bokeh.documents, roots = page.roots();
  roots[0].x_range.end = 30;
  seen.linked = roots.filter((plot) => plot.x_range.end === 30).length;
  const slider = document.querySelector("input[type=range]");
  slider.value = 3;
  slider.dispatchEvent(new Event("input"));
  seen.slider = [slider.nextElementSibling.textContent, ...page.get_model_by_name("frame").indices];
  seen.width = [document.documentElement.scrollWidth, innerWidth];
  seen.scrolls = all(document, ".bk-events").every((node) => getComputedStyle(node).touchAction === "auto");
  seen.heights = all(document, ".bk-events").map((node) => node.getBoundingClientRect().height);
  console.error("SEEN " + JSON.stringify(seen));
});
"""


@dataclass
class Opened:
    """What Chromium made of a page: the document after its scripts, their complaints, the addresses asked for."""

    document: str
    console: list[str]
    requests: list[str]


@pytest.fixture(scope="module")
def open_page(tmp_path_factory):
    """`open_page(file, *options)` -> Opened; options are Chromium's."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("Chromium is not installed; 'apt-get install chromium' on Debian")

    def open_(page: Path, *options: str) -> Opened:
        folder = tmp_path_factory.mktemp("chromium")
        command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
        command += [
            "--disable-background-networking",
            "--disable-component-update",
            f"--user-data-dir={folder}/profile",
        ]
        command += ["--enable-logging=stderr", f"--log-net-log={folder}/net.json", "--virtual-time-budget=12000"]
        command += [*options, "--window-size=1280,900", "--dump-dom", page.as_uri()]
        done = run_to_end(command, cwd=folder, env=os.environ, timeout_s=TIMEOUT_S)
        assert done.returncode == 0, done.stderr[-2000:]
        urls = re.findall(r'"url":"(https?:.*?)"', (folder / "net.json").read_text())
        console = [line for line in done.stderr.splitlines() if "CONSOLE" in line and NOTICE not in line]
        return Opened(done.stdout, console, [url for url in urls if not BROWSER_HOSTS.match(url)])

    return open_


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("report") / "run", STEPS)
    assert main([str(folder)]) == 0
    return folder / "report.html"


def test_every_plot_is_drawn_and_nothing_is_loaded_or_complained_of(open_page, page: Path):
    opened = open_page(page)
    assert opened.console == []
    assert opened.requests == []
    # Bokeh fills each place with an element of its own; what is in it hides in a shadow root.
    assert len(re.findall(r'data-root-id="\w+"[^>]*><div class="bk-Figure', opened.document)) == 14


def test_a_reader_on_a_phone_gets_values_and_the_checks_above_can_fail(open_page, page: Path, tmp_path: Path):
    text = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", page.read_text())
    probed = tmp_path / "probed.html"
    end = text.rindex("</body>")
    probed.write_text(f'{text[:end]}<img src="http://127.0.0.1:9/x"><script>{PROBE}</script>{text[end:]}')
    frame = tmp_path / "frame.html"
    frame.write_text('<body><iframe src="probed.html" style="width: 390px; height: 9000px"></iframe>')
    opened = open_page(frame, "--blink-settings=primaryPointerType=2,availablePointerTypes=2")  # a finger
    assert set(opened.requests) == {"http://127.0.0.1:9/x"}
    (told,) = [line for line in opened.console if "SEEN" in line]
    seen = json.loads(re.search(r'"SEEN (\{.*\})", source', told)[1])
    assert seen["loss"].startswith("step: 3") and "train, smoothed: 0." in seen["loss"]
    assert "backward: 0.4 s" in seen["time"] and "all: 1 s" in seen["time"]
    assert "rank: 2" in seen["ranks"] and "all: 0.9 s" in seen["ranks"]
    assert "expert: " in seen["expert_load"] and "% of the mean" in seen["expert_load"]
    assert seen["linked"] == 12, "all but the plots over ranks and experts"
    assert seen["slider"] == ["step 4", 3]
    assert seen["width"][0] <= seen["width"][1] == 390, "no sideways scrolling on a phone"
    assert seen["scrolls"] and min(seen["heights"]) > 60, "a finger on a plot scrolls the page"
