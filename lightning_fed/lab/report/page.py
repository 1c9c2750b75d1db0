"""The report as one HTML page, which needs neither a network nor another file."""

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from lightning_fed.lab.common import import_extra
from lightning_fed.lab.report.budgets import is_measured
from lightning_fed.lab.report.load import Method
from lightning_fed.lab.report.plots import AXES, curves_html
from lightning_fed.lab.report.tables import Row, table_cells
from lightning_fed.runs.folder import read_rows

__all__ = ["client_table", "config_differences", "html_table", "report_page", "split_pictures", "whole_page"]

_AGREEMENT = ("agreement/", "mask/")
_MOST_CLIENTS = 5000
# What tells runs of one method apart, or where they lie.
_NO_DIFFERENCE = ("seed_everything", "trainer.seed", "trainer.name", "trainer.default_root_dir", "ckpt_path")

# The browser itself refuses whatever a name from a config might make the page fetch.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-bottom: 1px solid #ddd; }
.wide { overflow: auto; max-height: 34rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
th, td { padding: 0.3rem 0.9rem 0.3rem 0; text-align: left; border-bottom: 1px solid #eee; vertical-align: top; }
thead th { position: sticky; top: 0; background: #fff; border-bottom: 2px solid #888; white-space: nowrap; }
th button { all: unset; cursor: pointer; font-weight: 600; } th button:focus-visible { outline: 2px solid #0072B2; }
th button::after { content: " \\2195"; color: #999; }
th[aria-sort=ascending] button::after { content: " \\2191"; color: inherit; }
th[aria-sort=descending] button::after { content: " \\2193"; color: inherit; }
.sortable td { white-space: nowrap; }
.main { height: 30rem; } .curves { display: grid; } .curves > div { height: 24rem; min-width: 0; }
@media (min-width: 50rem) { .curves { grid-template-columns: 1fr 1fr; } }
img { max-width: 100%; } figure, details { margin: 1rem 0; } summary { cursor: pointer; font-weight: 600; }
"""

# Cells that begin with a number are sorted by it, other cells come after them by their text.
_SORT = """
for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.parentElement, body = head.closest("table").tBodies[0];
  const sign = head.ariaSort === "ascending" ? -1 : 1;
  const text = row => row.cells[head.cellIndex].textContent;
  const number = row => text(row) ? Number(text(row).split(" ± ")[0]) : NaN;
  const compare = (a, b) => {
    const [x, y] = [number(a), number(b)];
    if (isNaN(x) && isNaN(y)) return sign * text(a).localeCompare(text(b));
    return isNaN(x) ? 1 : isNaN(y) ? -1 : sign * (x - y);
  };
  for (const other of head.parentElement.cells) other.ariaSort = null;
  head.ariaSort = sign > 0 ? "ascending" : "descending";
  for (const row of [...body.rows].sort(compare)) body.append(row);
});
"""


def report_page(rows: Sequence[Row], metric: str, x: str, others: Sequence[str], notes: Sequence[str]) -> str:
    """Makes the page of a table, curves against x, those of other metrics that every run measured, and what differs."""
    methods = [row.method for row in rows]
    axes = [x, *(name for name in AXES if name != x and is_measured(methods, name))]
    agreement = sorted({c for m in methods for run in m.runs for c in run.columns if c.startswith(_AGREEMENT)})
    layers = [column for column in agreement if column.count("/") > 1]
    overall = [column for column in agreement if column not in layers]
    differences = config_differences(methods)
    body = (
        f"<h1>{escape(metric)}, mean ± std over seeds</h1>",
        html_table(table_cells(rows, metric), sortable=True),
        *(f"<p>{escape(note)}</p>" for note in notes),
        f'<div class="main">{curves_html(methods, metric, axes, "curves")}</div>',
        *_curves(methods, [name for name in others if is_measured(methods, name)], axes, "others"),
        _section("Agreement", [*_curves(methods, overall, axes, "agreement"), *_by_layer(methods, layers)]),
        _section("What differs between the methods", [html_table(differences)] if differences else []),
        _section("Clients", _clients(methods)),
        _section("Split", [_picture(picture, shown) for picture, shown in split_pictures(methods).items()]),
    )
    return whole_page(metric, body)


def whole_page(title: str, body: Iterable[str]) -> str:
    """Makes a page of its parts, with the scripts that sorted tables and curves need."""
    plotly_js = import_extra("plotly.offline", "html", "`--format html`").get_plotlyjs()
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n<script>{plotly_js}</script>\n</head>\n<body>",
            *body,
            f"<script>{_SORT}</script>\n</body>\n</html>\n",
        ]
    )


def _section(title: str, parts: Sequence[str]) -> str:
    return "\n".join([f"<h2>{title}</h2>", *parts]) if parts else ""


def _curves(methods: Sequence[Method], metrics: Sequence[str], axes: Sequence[str], name: str) -> list[str]:
    figures = (curves_html(methods, metric, axes, f"{name}-{i}") for i, metric in enumerate(metrics))
    return ['<div class="curves">', *(f"<div>{figure}</div>" for figure in figures), "</div>"] if metrics else []


def _by_layer(methods: Sequence[Method], columns: Sequence[str]) -> list[str]:
    """A table in place of curves, which there would be a hundred of: the last value of each, mean over seeds."""
    lines = [["at the last measurement", *(method.label for method in methods)]]
    for column in columns:
        lasts = [[list(run.columns[column].values())[-1] for run in m.runs if column in run.columns] for m in methods]
        lines.append([column, *(f"{fmean(last):.4g}" if last else "" for last in lasts)])
    return [html_table(lines, sortable=True)] if columns else []


def html_table(lines: Sequence[Sequence[str]], sortable: bool = False) -> str:
    """Writes a header and lines, which a click on a column sorts if asked for."""
    heads = (f"<button>{escape(cell)}</button>" if sortable else escape(cell) for cell in lines[0])
    head = "".join(f'<th scope="col">{cell}</th>' for cell in heads)
    body = ("".join(f"<td>{escape(cell)}</td>" for cell in line) for line in lines[1:])
    rows = "\n".join(f"<tr>{cells}</tr>" for cells in body)
    kind = ' class="sortable"' if sortable else ""
    return f'<div class="wide"><table{kind}><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'


def _clients(methods: Sequence[Method]) -> list[str]:
    parts: list[str] = []
    for method in methods:
        run = method.runs[0]
        if lines := client_table(run.path / "clients.csv"):
            clients = f"{len(lines) - 1} clients"
            if len(lines) - 1 > _MOST_CLIENTS:
                clients = f"the first {_MOST_CLIENTS} of {clients}"
            title = f"<summary>{escape(method.label)}, seed {run.seed}: {clients}</summary>"
            table = html_table(lines[: _MOST_CLIENTS + 1], sortable=True)
            parts.append(f"<details{'' if parts else ' open'}>{title}{table}</details>")
    return parts


def _picture(picture: bytes, shown: Sequence[str]) -> str:
    image = f'<img alt="The split over clients" src="data:image/png;base64,{b64encode(picture).decode()}">'
    return f"<figure>{image}<figcaption>{escape('; '.join(shown))}</figcaption></figure>"


def config_differences(methods: Sequence[Method]) -> list[list[str]]:
    """Compares saved configs: a header with the methods that have one, and a line for each option that differs.

    Options have their names of the command line. Without differences there are no lines.
    """
    configs = {m.label: _flatten(config) for m in methods if (config := _config(m.runs[0].path / "config.yaml"))}
    lines = []
    for option in dict.fromkeys(option for config in configs.values() for option in config):
        values = [config.get(option, "") for config in configs.values()]
        if len(set(values)) > 1 and option not in _NO_DIFFERENCE:
            lines.append([option, *values])
    return [["option", *configs], *lines] if lines else []


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():  # a run from Python has none, and a device or a pipe may never end
        return {}
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):  # what is damaged says nothing
        return {}
    return config if isinstance(config, dict) else {}


def _flatten(value: Any, option: str = "") -> dict[str, str]:
    inner: Mapping[Any, Any] | None = value if isinstance(value, dict) and value else None
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        inner = dict(enumerate(value))
    if inner is None:
        return {option: value if isinstance(value, str) else json.dumps(value, default=str)}
    flat: dict[str, str] = {}
    for key, item in inner.items():
        below = option if key in ("class_path", "init_args") else f"{option}.{key}".lstrip(".")
        flat |= _flatten(item, below)
    return flat


def client_table(path: Path) -> list[list[str]]:
    """Reads the header and the lines of a run's ``clients.csv``; empty without one."""
    rows = list(read_rows(path))
    return [list(rows[0]), *([_shortened(cell) for cell in row.values()] for row in rows)] if rows else []


def _shortened(cell: str) -> str:
    with suppress(ValueError):
        return f"{float(cell):.4g}" if "." in cell else cell
    return cell


def split_pictures(methods: Sequence[Method]) -> dict[bytes, list[str]]:
    """Finds the picture of each split, by classes where there are any, with the methods whose first run has it."""
    pictures: dict[bytes, list[str]] = {}
    for method in methods:
        folder = method.runs[0].path
        path = next((path for name in ("split", "sizes") if (path := folder / f"{name}.png").is_file()), None)
        if path is not None:
            pictures.setdefault(path.read_bytes(), []).append(f"{method.label}, seed {method.runs[0].seed}")
    return pictures
