"""Times rounds of the framework against a loop written by hand, and methods against FedAvg.

    python -m benchmarks.run

or `make bench`. The sides of a row run their rounds by turns; a row's figure is the median of the ratios of
neighbouring repeats. A row that the installed package or this machine cannot run is left out with a line that says why.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.environment import machine, start_with_settings
from benchmarks.figures import show
from benchmarks.race.rows import run_rows
from benchmarks.results import write_json
from benchmarks.start_and_memory import FIGURES, run_figures
from benchmarks.tables import GPU_ROWS, ROWS

__all__ = ["main"]


def _arguments() -> argparse.Namespace:
    keys = [row.key for row in ROWS + GPU_ROWS] + list(FIGURES)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=keys, choices=keys, metavar="ROW", help=f"of {', '.join(keys)}")
    parser.add_argument("--repeats", type=int, help="repeats of every row; by default 15, and 5 for work C")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/bench.json"))
    parser.add_argument("--write-docs", action="store_true", help="write into docs/performance.md and docs/images")
    return parser.parse_args()


def main() -> int:
    """Runs the rows, writes JSON, a table and a plot; returns 1 if a row has failed."""
    arguments = _arguments()
    results = {"machine": machine("lightning", "lightning_fed")}
    rows = [row for row in ROWS + GPU_ROWS if row.key in arguments.rows]
    results["rows"] = run_rows(rows, arguments.repeats, arguments.output.parent / "logs")
    figures = [key for key in FIGURES if key in arguments.rows]
    results["figures"] = run_figures(figures, arguments.repeats or 5)
    write_json(arguments.output, results)
    show(arguments.output, arguments.write_docs)
    everything = [*results["rows"].values(), *results["figures"].values()]
    return int(any("failed" in result for result in everything))


if __name__ == "__main__":
    start_with_settings("benchmarks.run")
    sys.exit(main())
