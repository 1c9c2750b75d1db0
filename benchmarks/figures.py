"""Tables and plots of results, on screen and in docs/performance.md.

    python -m benchmarks.figures runs/bench/bench.json --write-docs

writes what a former run has found into the page, between the marks that stand there for it.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.results import milliseconds

__all__ = ["DOCS", "IMAGES", "docs_text", "plot_ratios", "settings_line", "table", "write_block"]

ROOT = Path(__file__).resolve().parents[1]
DOCS, IMAGES = ROOT / "docs" / "performance.md", ROOT / "docs" / "images"
_BLUE, _GREY, _RED = "#4878a8", "#999999", "#c04030"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"


def _row(key: str, result: dict[str, Any]) -> list[str]:
    name = f"{key} ({result['note']})" if result["note"] else key
    if "ratio" not in result:
        why = result.get("skipped") or result["failed"]
        return [name, result["side"], result["against"], f"not run: {why}", "", ""]
    return [
        name,
        f"{result['side']} {milliseconds(result['seconds'])}",
        f"{result['against']} {milliseconds(result['against_seconds'])}",
        f"{result['ratio']:.2f} ×",
        f"{result['ratio_min']:.2f} – {result['ratio_max']:.2f}",
        *([f"{result['again']:.2f} ×"] if "again" in result else []),
        "" if result["aim"] is None else f"{result['aim']:.2f}",
    ]


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Writes rows as a Markdown table."""
    head = ["row", "a round of", "against", "ratio", "from – to", "aim"]
    if any("again" in result for result in rows.values()):
        head.insert(5, "second run")
    lines = [_line(head), _line(["---"] * len(head))]
    cells = [_row(key, result) for key, result in rows.items()]
    for row in cells:
        row[-1:-1] = [""] * (len(head) - len(row))
    return "".join(lines + [_line(row) for row in cells])


def figures_table(figures: dict[str, dict[str, Any]]) -> str:
    """Writes what was measured in processes of their own as a Markdown table."""
    lines = [_line(["what", "figure", "from – to", "aim"]), _line(["---"] * 4)]
    for result in figures.values():
        if "failed" in result:
            lines.append(_line([result["text"], f"failed: {result['failed']}", "", ""]))
            continue
        least, most = min(result["values"]), max(result["values"])
        text = f"{result['text']} ({result['note']})" if result["note"] else result["text"]
        value, aim = (f"{number:.2f} {result['unit']}" for number in (result["value"], result["aim"]))
        lines.append(_line([text, value, f"{least:.2f} – {most:.2f}", aim]))
    return "".join(lines)


def settings_line(results: dict[str, Any]) -> str:
    """Says in a sentence where a run happened."""
    machine = results["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    gpu = f", {machine['gpu']}" if machine["gpu"] else ""
    return (
        f"Measured on {machine['cores']} cores of {machine['processor']}{gpu}, load average "
        f"{machine['load_average']} at the start; {versions}."
    )


def plot_ratios(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """Draws the median of each row's ratios, their range, and the aim."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from docs.pictures import save

    found = {key: result for key, result in rows.items() if "ratio" in result}
    figure, axes = plt.subplots(figsize=(8, 0.9 + 0.32 * len(found)))
    for at, result in enumerate(found.values()):
        aim, ratio = result["aim"], result["ratio"]
        colour = _GREY if aim is None else _BLUE if ratio <= aim else _RED
        axes.barh(at, ratio, color=colour, height=0.6)
        axes.hlines(at, result["ratio_min"], result["ratio_max"], color="black", linewidth=1)
        if aim is not None:
            axes.vlines(aim, at - 0.42, at + 0.42, color="black", linewidth=2)
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.axvline(1.0, color=_GREY, linewidth=0.8, linestyle=":")
    axes.set_xlabel("time of a round over that of the other side: median, range, and aim (thick mark)")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, path, dpi=120)
    plt.close(figure)


def docs_text(results: dict[str, Any], image: str) -> str:
    """Writes what goes into the page for the rows of a run."""
    works = dict.fromkeys(f"- {key.partition('-')[0]}: {row['work']}" for key, row in results["rows"].items())
    parts = ["\n".join(works) + "\n", table(results["rows"])]
    if any("ratio" in row for row in results["rows"].values()):
        parts.append(f"![Ratios of all rows](images/{image})\n")
    if results.get("figures"):
        parts.append(figures_table(results["figures"]))
    return "\n".join([*parts, settings_line(results) + "\n"])


def write_block(page: Path, name: str, text: str) -> None:
    """Replaces what stands between the marks of a name.

    Raises:
        ValueError: If the page has no such marks.
    """
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    before, found_begin, rest = page.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"Expected the marks of {name!r} in {page}, found none.")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def main() -> None:
    """Prints the table of a former run, draws its plot, and writes both into the page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="what benchmarks.run or benchmarks.peers has written")
    parser.add_argument("--write-docs", action="store_true", help="write into docs/performance.md and docs/images")
    parser.add_argument("--again", type=Path, help="what a second run of the same has written")
    arguments = parser.parse_args()
    show(arguments.results, arguments.write_docs, arguments.again)


def show(path: Path, write_docs: bool, again: Path | None = None) -> None:
    """Prints and draws a run's results; its file's name is that of its marks in the page.

    Args:
        path: What the run has written.
        write_docs: Whether to write into the page.
        again: What a second run has written, whose ratios stand beside.
    """
    results = json.loads(path.read_text())
    for key, row in json.loads(again.read_text())["rows"].items() if again is not None else ():
        if key in results["rows"] and "ratio" in row:
            results["rows"][key]["again"] = row["ratio"]
    image = f"{path.stem}-ratios.png"
    text = docs_text(results, image)
    print(f"\n{text}")
    plot_ratios(results["rows"], path.parent / image)
    if write_docs:
        plot_ratios(results["rows"], IMAGES / image)
        write_block(DOCS, path.stem, text)


if __name__ == "__main__":
    main()
