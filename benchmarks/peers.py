"""Times rounds of other frameworks, and of this one, against the loop written by hand, all in one run.

    make bench-peers

makes an environment of its own and runs this in it. Peers are used through their public interfaces, with batches by
index and a resident model wherever they leave that to their user. One that cannot be installed is named with the reason
that pip gives.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.contestants.contestant import Contestant
from benchmarks.contestants.installed import PEERS, install
from benchmarks.environment import machine, start_with_settings
from benchmarks.figures import show
from benchmarks.race.rows import run_rows
from benchmarks.results import write_json
from benchmarks.tables import Row

__all__ = ["ahead", "main", "rows_of"]

# The ways in which this framework trains a work, by the end of the row's name; the first is with default options.
_WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "A": {"": {}, "-usual-layout": {"engine": "sequential", "memory_format": "preserve"}},
    "B": {
        "": {},
        "-sequential": {"engine": "sequential"},
    },
    "C": {"": {}},
}


def rows_of(key: str) -> list[Row]:
    """Returns the rows of a work: this framework and every peer, with one process and with two."""
    rows = []
    for devices in (1, 2):
        end = "" if devices == 1 else "-2"
        for way, options in _WAYS[key].items():
            rows.append(Row(f"{key}-lightning_fed{way}{end}", key, Contestant(devices=devices, **options)))
        rows += [Row(f"{key}-flower{end}", key, Contestant("flower", devices=devices))]
        rows += [Row(f"{key}-pfl{end}", key, Contestant("pfl", devices=devices))]
    return [*rows, Row(f"{key}-fedlab", key, Contestant("fedlab"))]


def ahead(rows: dict[str, dict[str, Any]], key: str, devices: int) -> str:
    """Says how far the fastest row of this framework is ahead of each peer on a work, with so many processes."""
    ratios: dict[str, float] = {}
    for name, row in rows.items():
        if name.startswith(f"{key}-") and name.endswith("-2") == (devices == 2) and "ratio" in row:
            who = name.split("-")[1]
            ratios[who] = min(row["ratio"], ratios.get(who, row["ratio"]))
    ours = ratios.pop("lightning_fed", None)
    if ours is None or not ratios:
        return f"work {key}, {devices} process(es): nothing to compare"
    said = ", ".join(f"{who} {ratio / ours:.2f} x" for who, ratio in sorted(ratios.items()))
    return f"work {key}, {devices} process(es): the time of a peer over that of lightning_fed: {said}"


def main() -> int:
    """Runs the rows, writes JSON, a table and a plot; returns 1 if a row has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="install the peers into this environment, and end")
    parser.add_argument("--works", nargs="+", default=["A", "B"], choices=list(_WAYS))
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--repeats", type=int, help="repeats of every row; by default 15, and 5 for work C")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/peers.json"))
    parser.add_argument("--write-docs", action="store_true", help="write into docs/performance.md and docs/images")
    arguments = parser.parse_args()
    if arguments.install:
        install()
        return 0
    distributions = [PEERS[peer][0] for peer in arguments.peers]
    results = {"machine": machine("lightning", "lightning_fed", *distributions, "ray")}
    print(", ".join(f"{name} {number}" for name, number in results["machine"]["versions"].items()), flush=True)
    rows = [row for key in arguments.works for row in rows_of(key)]
    rows = [row for row in rows if row.side.loop in ("framework", *arguments.peers)]
    results["rows"] = run_rows(rows, arguments.repeats, arguments.output.parent / "logs")
    write_json(arguments.output, results)
    show(arguments.output, arguments.write_docs)
    print("\n".join(ahead(results["rows"], key, devices) for key in arguments.works for devices in (1, 2)))
    return int(any("failed" in row for row in results["rows"].values()))


if __name__ == "__main__":
    start_with_settings("benchmarks.peers")
    sys.exit(main())
