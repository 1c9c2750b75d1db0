"""The report as one HTML page that needs neither a network nor other files."""

import json
import re
import warnings
from base64 import b64encode
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from html import escape
from itertools import product
from pathlib import Path
from typing import Any

from lightning_fed.cli.yaml_loader import read_yaml
from lightning_fed.core.files import read_regular
from lightning_fed.errors import FederatedError, import_extra
from lightning_fed.lab.report.plots import curves_html
from lightning_fed.lab.report.runs import Method, counted
from lightning_fed.runs.folder import read_rows
from lightning_fed.runs.statistics import mean_of

__all__ = [
    "MOST_LINES", "client_table", "coded", "config_differences", "details_of_runs", "differing", "html_table",
    "in_pairs", "run_config", "run_options", "section", "split_pictures", "whole_page",
]  # fmt: skip

MOST_LINES = 14
"""The largest number of methods that colours and dashes can tell apart in one picture."""

_DRAWN = {"Other metrics": (), "Agreement": ("agreement", "mask"), "Updates": ("update",)}
# First parts of columns that are no metric of the module, which may have any name.
_NO_METRICS = (
    "agreement", "clients", "comm", "gap", "gradient", "gradients", "lr", "mask", "per_client", "samples", "simulated",
    "time", "update",
)  # fmt: skip
_MOST_CLIENTS = 5000
# Options that differ between runs of one method: seeds, names and folders.
_NO_DIFFERENCE = ("seed_everything", "trainer.seed", "trainer.name", "trainer.default_root_dir", "ckpt_path")

# With this policy the browser loads nothing from outside, even if a name in a config contains HTML.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def details_of_runs(methods: Sequence[Method], axes: Sequence[str], shown: Collection[str]) -> list[str]:
    """Makes a section for each kind of content in run folders that is not ``shown`` already.

    Metrics of single layers, and of too many methods for one picture, are tables instead of curves.
    """
    columns = sorted({column for method in methods for run in method.runs for column in run.columns} - {*shown})
    parts = []
    for title, wanted in _DRAWN.items():
        first = {column: column.partition("/")[0] for column in columns}
        found = [name for name in columns if first[name] in wanted or (not wanted and first[name] not in _NO_METRICS)]
        drawn = [column for column in found if column.count("/") <= 1 and len(methods) <= MOST_LINES]
        listed = _at_last(methods, [column for column in found if column not in drawn])
        parts.append(section(title, [*_curves(methods, drawn, axes, title.split()[0].lower()), *listed]))
    differences = config_differences(methods)
    parts.append(section("What differs between the methods", [html_table(differences)] if differences else []))
    pictures = [_picture(picture, names) for picture, names in split_pictures(methods).items()]
    return [*parts, section("Clients", _clients(methods)), section("Split", pictures)]


def whole_page(title: str, body: Iterable[str]) -> str:
    """Makes a page of its parts, with the scripts for sorting tables and drawing curves."""
    style, script = (Path(__file__).with_name(f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    named = escape(title.replace("`", ""))
    plotly_js = import_extra("plotly.offline", "html", "`--format html`").get_plotlyjs()
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            f"<title>{named}</title>\n<style>{style}</style>\n<script>{plotly_js}</script>\n</head>\n<body>",
            *body,
            f"<script>{script}</script>\n</body>\n</html>\n",
        ]
    )


def section(title: str, parts: Sequence[str]) -> str:
    """Adds a heading to parts, if there are any."""
    return "\n".join([f"<h2>{title}</h2>", *parts]) if parts else ""


def _curves(methods: Sequence[Method], metrics: Sequence[str], axes: Sequence[str], name: str) -> list[str]:
    numbered = dict(enumerate(methods))
    return in_pairs([curves_html(numbered, metric, axes, f"{name}-{i}") for i, metric in enumerate(metrics)])


def in_pairs(figures: Sequence[str]) -> list[str]:
    """Puts figures side by side where the window is wide enough; one alone has the whole width."""
    return ['<div class="curves">', *figures, "</div>"] if len(figures) > 1 else [*figures]


def _at_last(methods: Sequence[Method], columns: Sequence[str]) -> list[str]:
    """Returns a table of the last values instead of curves, as means over seeds."""
    lines = [["at the last measurement", *(method.label for method in methods)]]
    for column in columns:
        lasts = [[list(run.columns[column].values())[-1] for run in m.runs if column in run.columns] for m in methods]
        lines.append([column, *(f"{mean_of(last):.4g}" if last else "" for last in lasts)])
    return [html_table(lines, sortable=True)] if columns else []


def coded(text: str) -> str:
    """Writes a text as HTML, of which what is between backquotes is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def html_table(lines: Sequence[Sequence[str]], sortable: bool = False) -> str:
    """Writes a header and lines as HTML; if ``sortable``, a click on a column sorts them."""
    heads = (f"<button>{escape(cell)}</button>" if sortable else escape(cell) for cell in lines[0])
    head = "".join(f'<th scope="col">{cell}</th>' for cell in heads)
    body = ("".join(f"<td>{escape(cell)}</td>" for cell in line) for line in lines[1:])
    rows = "\n".join(f"<tr>{cells}</tr>" for cells in body)
    kind = ' class="sortable"' if sortable else ""
    return f'<div class="wide"><table{kind}><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'


def _clients(methods: Sequence[Method]) -> list[str]:
    parts: list[str] = []
    most = _MOST_CLIENTS // max(1, len(methods))
    for method, (file, kind) in product(methods, {"clients": "client", "unseen": "unseen client"}.items()):
        run = method.runs[0]
        if lines := client_table(run.path / f"{file}.csv"):
            count = len(lines) - 1
            clients = counted(count, kind) if count <= most else f"the first {most:,} of {count:,} {kind}s"
            title = f"<summary>{escape(method.label)}, seed {run.seed}: {clients}</summary>"
            table = html_table(lines[: most + 1], sortable=True)
            parts.append(f"<details{'' if parts else ' open'}>{title}{table}</details>")
    return parts


def _picture(picture: bytes, shown: Sequence[str]) -> str:
    image = f'<img alt="The split over clients" src="data:image/png;base64,{b64encode(picture).decode()}">'
    return f"<figure>{image}<figcaption>{escape('; '.join(shown))}</figcaption></figure>"


def config_differences(methods: Sequence[Method]) -> list[list[str]]:
    """Compares saved configs: a header with the methods that have a config, and a line for each option that differs.

    Options have their command-line names. Without differences there are no lines.
    """
    configs = {m.label: options for m in methods if (options := run_options(m.runs[0].path))}
    lines = [[option, *(c.get(option, "") for c in configs.values())] for option in differing(configs.values())]
    return [["option", *configs], *lines] if lines else []


def differing(configs: Collection[Mapping[str, str]]) -> list[str]:
    """Returns the options that differ between flat configs, except those that differ between runs of one method."""
    options = dict.fromkeys(option for config in configs for option in config if option not in _NO_DIFFERENCE)
    return [option for option in options if len({config.get(option, "") for config in configs}) > 1]


def run_options(folder: Path) -> dict[str, str]:
    """Reads the options of a run by their command-line names; for a run from Python, the arguments of its objects."""
    return _flatten(config) if (config := run_config(folder)) else {}


def run_config(folder: Path) -> dict[str, Any]:
    """Reads what a run was started with, nested as in YAML; empty if it cannot be read."""
    return _config(folder / "config.yaml") or _config(folder / "options.json")


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():  # a run has one of the two files; reading a device or a pipe may never end
        return {}
    try:
        config = read_yaml(path)
    except FederatedError as error:
        warnings.warn(f"Left out the options of a run. {error}", stacklevel=2)
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
    """Reads the header and the lines of a run's table of clients, without empty columns; empty if there is none."""
    rows = list(read_rows(path))
    heads = [head for head in (rows[0] if rows else ()) if any(row[head] for row in rows)]
    return [heads, *([_shortened(row[head]) for head in heads] for row in rows)] if rows else []


def _shortened(cell: str) -> str:
    with suppress(ValueError):
        return f"{float(cell):.4g}" if "." in cell else cell
    return cell


def split_pictures(methods: Sequence[Method]) -> dict[bytes, list[str]]:
    """Finds the picture of each split, by classes if there are any, with the methods whose first run has this split."""
    pictures: dict[bytes, list[str]] = {}
    for method in methods:
        folder = method.runs[0].path
        path = next((path for name in ("split", "sizes") if (path := folder / f"{name}.png").is_file()), None)
        if path is not None:
            pictures.setdefault(read_regular(path), []).append(f"{method.label}, seed {method.runs[0].seed}")
    return pictures
