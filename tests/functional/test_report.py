"""The report page in headless Chromium: it draws and listens, complains of nothing, asks the network for nothing."""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import run_to_end
from report_run import EXPERTS, LAYERS, RANKS, write_run

from titanlite.features.report import main

STEPS = 60
TIMEOUT_S = 120  # 2 s on 2 idle cores
# What Chromium itself asks for at its start, whatever the page.
BROWSER_HOSTS = re.compile(r"https?://([a-z0-9-]+\.)*(google|googleapis|gvt1|gstatic)\.com[:/]")

# Put into a copy of the page: what a reader does, and what the page says to it.
PROBE = """
const seen = {};
const plot = (name) => document.getElementById("plot-" + name);
const tips = (name) => [...plot(name).querySelectorAll(".tip")].filter((t) => !t.hidden);
const tip = (name) => tips(name).map((t) => t.textContent).join();
const move = (name, x, y) => {
  const svg = plot(name).querySelector("svg"), box = svg.getBoundingClientRect();
  const at = {clientX: box.left + x * box.width, clientY: box.top + y * box.height};
  svg.dispatchEvent(new PointerEvent("pointermove", at));
};
for (const name of ["loss", "time", "ranks", "expert_load", "layer_load"]) {
  move(name, 0.6, 0.4);
  seen[name] = tip(name);
}
const svg = plot("lr").querySelector("svg");
svg.dispatchEvent(new KeyboardEvent("keydown", {key: "End"}));
seen.end_key = tip("lr");
plot("grad_groups").querySelector(".legend button").click();
seen.toggled = plot("grad_groups").dataset.points;
const slider = plot("expert_load").querySelector("input");
const before = plot("expert_load").querySelector("image").getAttribute("href");
slider.value = 3;
slider.dispatchEvent(new Event("input"));
seen.slider = plot("expert_load").querySelector("output").textContent;
seen.redrawn = plot("expert_load").querySelector("image").getAttribute("href") !== before;
seen.width = [document.documentElement.scrollWidth, window.innerWidth];
seen.labels = [...document.querySelectorAll("figure svg")].every((s) => s.getAttribute("aria-label"));
document.body.dataset.seen = JSON.stringify(seen);
console.error("the probe is heard");
"""


@dataclass
class Opened:
    """What Chromium made of a page: the document after its scripts, their complaints, the addresses asked for."""

    document: str
    console: list[str]
    requests: list[str]


@pytest.fixture(scope="module")
def open_page(tmp_path_factory):
    """`open_page(file, width)` -> Opened."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("Chromium is not installed; 'apt-get install chromium' on Debian")

    def open_(page: Path, width: int = 1280) -> Opened:
        folder = tmp_path_factory.mktemp("chromium")
        command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
        command += [
            "--disable-background-networking",
            "--disable-component-update",
            f"--user-data-dir={folder}/profile",
        ]
        command += ["--enable-logging=stderr", f"--log-net-log={folder}/net.json", "--virtual-time-budget=2000"]
        command += [f"--window-size={width},900", "--dump-dom", page.as_uri()]
        done = run_to_end(command, cwd=folder, env=os.environ, timeout_s=TIMEOUT_S)
        assert done.returncode == 0, done.stderr[-2000:]
        urls = re.findall(r'"url":"(https?:.*?)"', (folder / "net.json").read_text())
        console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        return Opened(done.stdout, console, [url for url in urls if not BROWSER_HOSTS.match(url)])

    return open_


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("report") / "run", STEPS)
    assert main([str(folder)]) == 0
    return folder / "report.html"


def test_every_plot_has_data_and_nothing_is_loaded_or_complained_of(open_page, page: Path):
    opened = open_page(page)
    assert opened.console == []
    assert opened.requests == []
    points = {
        name: int(count)
        for name, count in re.findall(r'<figure id="plot-(\w+)".*? data-points="(\d+)"', opened.document)
    }
    assert re.search(r'<html[^>]* data-drawn="(\d+)"', opened.document)[1] == str(len(points))
    assert points["loss"] == 3 * STEPS + 3, "raw, smoothed, the largest, and three validations"
    assert points["time"] == 6 * STEPS and points["ranks"] == 2 * RANKS
    assert points["expert_load"] == LAYERS * EXPERTS and points["layer_load"] == LAYERS * STEPS
    assert all(count > 0 for count in points.values()) and len(points) == 17
    assert opened.document.count('<path class="line') >= 15
    drawn = opened.document.partition("<main>")[2].partition("</main>")[0]
    assert not re.search(r"NaN|Infinity|undefined|\[object", drawn)


def test_a_reader_on_a_phone_gets_values_and_the_checks_above_can_fail(open_page, page: Path, tmp_path: Path):
    text = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", page.read_text())
    probed = tmp_path / "probed.html"
    probed.write_text(text.replace("</body>", f'<img src="http://127.0.0.1:9/x"><script>{PROBE}</script></body>'))
    opened = open_page(probed, width=390)
    assert any("the probe is heard" in line for line in opened.console)
    assert set(opened.requests) == {"http://127.0.0.1:9/x"}
    seen = json.loads(re.search(r'data-seen="(.*?)"', opened.document)[1].replace("&quot;", '"'))
    assert seen["loss"].startswith("step 3") and "train, smoothed" in seen["loss"]
    assert "backward 0.4 s" in seen["time"] and "all 1 s" in seen["time"]
    assert "rank 2" in seen["ranks"] and "busy 0.9 s" in seen["ranks"]
    assert "expert" in seen["expert_load"] and "layer 2" in seen["expert_load"]
    assert seen["layer_load"].endswith(" x") and "step 3" in seen["layer_load"]
    assert seen["end_key"].startswith("step 60") and "0.001" in seen["end_key"]
    assert (seen["toggled"], seen["slider"], seen["redrawn"]) == (str(STEPS), "step 4", True)
    assert seen["labels"] and seen["width"][0] <= seen["width"][1], "no sideways scrolling on a phone"
