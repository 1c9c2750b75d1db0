"""Run folders, runs of which a report is made, and pages as they are written and as a browser shows them."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lightning_fed.lab.report.runs import Columns, MeasuredRun, Method

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")


def write_run(
    root: Path,
    group: str = "a",
    seed: int = 0,
    values: Sequence[float] | Mapping[int, float] = (),
    *,
    label: str = "FedAvg",
    name: str = "",
    created: float | None = None,
    metric: str = "test/acc",
    text: str | None = None,
) -> Path:
    """Writes a run folder: ``values`` of one metric by round, or the text of the whole metrics.csv."""
    count = len(list(root.rglob("run.json")))
    path = root / "runs" / (name or group) / f"version_{count}"
    path.mkdir(parents=True)
    about = {"fingerprint": f"{group}{seed}", "group": group, "label": label, "name": name, "seed": seed}
    about |= {"wandb_id": "1", "created": count if created is None else created}
    (path / "run.json").write_text(json.dumps(about))
    if text is None:
        by_round = dict(values) if isinstance(values, Mapping) else dict(enumerate(values))
        text = f"round,{metric}\n" + "".join(f"{at},{value}\n" for at, value in by_round.items())
    (path / "metrics.csv").write_text(text)
    return path


def method(label: str, *runs: Columns) -> Method:
    """A method whose seeds measured these columns."""
    facts = {"fingerprint": "f", "group": "g", "label": label, "name": "", "wandb_id": "1", "created": 0.0}
    return Method(
        label, tuple(MeasuredRun(Path(label), seed=seed, columns=run, **facts) for seed, run in enumerate(runs))
    )


class Page(HTMLParser):
    """Texts of the tables' cells and of scripts, and whatever a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.headings: list[str] = []
        self.scripts: list[str] = []
        self.links: list[str] = []
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [str(value) for name, value in attrs if name in ("src", "href")]
        self._open = tag if tag != "button" else self._open
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = self._open if tag == "button" else ""

    def handle_data(self, data: str) -> None:
        if self._open in ("td", "th"):
            self.tables[-1][-1][-1] += data
        elif self._open in ("h1", "h2"):
            self.headings.append(data)
        elif self._open == "script":
            self.scripts[-1] += data

    def figures(self) -> list[tuple[list[dict], dict]]:
        """Traces and layout of each figure."""
        decode, found = json.JSONDecoder().raw_decode, []
        for script in self.scripts:
            if start := re.search(r'newPlot\(\s*"[\w-]+",\s*', script):
                traces, end = decode(script, start.end())
                found.append((traces, decode(script, script.index("{", end))[0]))
        return found


def opened(page: Path, script: str, folder: Path) -> tuple[str, list[str]]:
    """Opens a page in a browser, runs a script in it and returns the page as it then is, and what the console says."""
    names = [os.environ.get("LIGHTNING_FED_BROWSER"), *BROWSERS]
    browser = next((found for name in names if name and (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on PATH, and LIGHTNING_FED_BROWSER names none")
    copy = folder / "page.html"
    text = page.read_text(encoding="utf-8")
    copy.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=4000"]
    words += [f"--user-data-dir={folder / 'profile'}", "--dump-dom", copy.as_uri()]
    done = subprocess.run([browser, *words], capture_output=True, text=True, encoding="utf-8", timeout=120, check=True)
    return done.stdout, re.findall(r'CONSOLE.*?\] (".*)', done.stderr)


def fits_the_window(page: Path, folder: Path, width: int) -> bool:
    """Opens a page in a frame, as windows have a least width: nothing sticks out, or covers a button or the curves."""
    inner = folder / f"inner-{width}.html"
    ask = """
      const covers = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
      const overlaps = chart => {
        const parts = [...chart.querySelectorAll(".updatemenu-header, .updatemenu-button, .modebar-btn, .nsewdrag")];
        const boxes = parts.map(part => part.getBoundingClientRect());
        return boxes.flatMap((box, at) => boxes.slice(at + 1).filter(other => covers(box, other))).length;
      };
      addEventListener("load", () => setTimeout(() => {
        const covered = [...document.querySelectorAll(".js-plotly-plot")].map(overlaps);
        parent.postMessage([document.documentElement.scrollWidth, innerWidth, covered.reduce((a, b) => a + b, 0)], "*");
      }, 1000))"""
    inner.write_text(
        page.read_text(encoding="utf-8").replace("</body>", f"<script>{ask}</script></body>"), encoding="utf-8"
    )
    outer = folder / f"outer-{width}.html"
    outer.write_text(f'<!DOCTYPE html><body><iframe src="{inner.name}" width="{width}" height="900"></iframe></body>')
    shown, _ = opened(
        outer, "addEventListener('message', event => { document.title = event.data.join(' '); });", folder
    )
    scrolled, seen, covered = map(int, re.findall(r"<title>(\d+) (\d+) (\d+)</title>", shown)[0])
    assert (seen, covered) == (width, 0)
    return scrolled <= seen
