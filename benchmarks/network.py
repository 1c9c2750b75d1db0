"""Seconds and bytes of a round over nodes: in one process, over nodes in it, and over the processes of Flower.

    .venv-flower/bin/python -m benchmarks.network --nodes 2 5 10

or `make bench-network`. The quickstart, 10 of 20 clients a round. All processes are on this machine: nodes
share its cores, and the network costs nothing.
"""

import argparse
import csv
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.environment import machine, start_with_settings
from benchmarks.flower_net import BIN, Net
from lightning_fed.cli.federated_cli import FederatedCLI
from lightning_fed.cli.flower.command import NodeCLI
from lightning_fed.trainer.fleet import LocalFleet, Node

_WORDS = "--config quickstart --trainer.enable_progress_bar false --trainer.enable_model_summary false"
_CLIENTS = 20


def shares(nodes: int) -> list[range]:
    """Divides the clients over nodes."""
    ends = [_CLIENTS * node // nodes for node in range(nodes + 1)]
    return [range(first, end) for first, end in zip(ends, ends[1:], strict=False)]


def in_process(words: list[str], folder: Path, nodes: int = 0) -> Path:
    """Trains without nodes, or with nodes in this process; returns the run's folder."""

    class OverNodes(FederatedCLI):
        def before_fit(self) -> None:
            if nodes:
                parts = {str(share): (NodeCLI(words, builds=True), share) for share in shares(nodes)}
                fleet = {name: Node(cli.trainer, cli.model, cli.datamodule, own) for name, (cli, own) in parts.items()}
                self.trainer.fleet = LocalFleet(fleet)

    name = f"local-{nodes}"
    OverNodes(["fit", *words, "--trainer.default_root_dir", str(folder), "--trainer.name", name])
    return folder / name / "version_0"


def over_flower(words: list[str], folder: Path, nodes: int) -> Path:
    """Trains with a SuperNode and a worker for each node; returns the run's folder."""
    with Net(folder / f"flower-{nodes}", nodes) as net:
        net.new("bench", *words)
        for node, share in enumerate(shares(nodes)):  # one after the other, so that they do not hinder each other
            net.await_worker(net.start_worker("bench", node, "--clients", f"{share.start}:{share.stop}"))
        run = net.submit("bench", "--trainer.name bench")
        net.await_run(run, 3600)
        folder = net.folder / "runs" / "bench" / "version_0"
        if not folder.exists():
            raise RuntimeError(net.said(run))
        return folder


def figures(run: Path) -> dict[str, float]:
    """The median of the rounds but for the first, which sets up, in seconds and bytes."""
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))[2:]
    names = ("time/round", "fleet/bytes_down", "fleet/bytes_up")
    return {name: statistics.median(float(row.get(name) or 0) for row in rows) for name in names}


def main() -> None:
    """Measures, and prints the table of docs/network.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 5, 10])
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    start_with_settings("benchmarks.network")
    words = [*_WORDS.split(), "--trainer.max_rounds", str(options.rounds)]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        began = time.perf_counter()
        subprocess.run([BIN / "flwr-clientapp", "--help"], check=True, capture_output=True)
        start = time.perf_counter() - began
        rows: list[tuple[str, dict[str, float]]] = [("one process", figures(in_process(words, folder)))]
        for nodes in options.nodes:
            rows.append((f"{nodes} nodes in it", figures(in_process(words, folder, nodes))))
            rows.append((f"{nodes} nodes by Flower", figures(over_flower(words, folder, nodes))))
    print(_table(rows))
    print(f"\nA process of Flower starts in {start:.1f} s. {machine()}")


def _table(rows: list[tuple[str, dict[str, Any]]]) -> str:
    lines = ["| | seconds per round | bytes down | bytes up |", "| --- | --- | --- | --- |"]
    for name, row in rows:
        sent = (f"{row[f'fleet/bytes_{way}']:,.0f}" if row["fleet/bytes_up"] else "" for way in ("down", "up"))
        lines.append(f"| {name} | {row['time/round']:.2f} | {' | '.join(sent)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
