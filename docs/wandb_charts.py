"""Draws what Weights & Biases was sent, as the workspace of `lightning-fed dashboard` shows it.

    WANDB_MODE=offline lightning-fed fit --config configs/quickstart.yaml --trainer.name charts/fedavg ...
    python docs/wandb_charts.py runs/charts

reads the offline runs below the folder, groups them as the workspace does, and writes docs/images/wandb-charts.png: a
row for each section, a chart over `round` for each column, the mean of a group's seeds with a band of one standard
deviation.
"""

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.pyplot import subplots
from pictures import save
from wandb.proto.wandb_internal_pb2 import Record

from lightning_fed.lab.dashboard_command import sections_of

__all__ = ["main"]

IMAGE = Path(__file__).resolve().parent / "images" / "wandb-charts.png"
ACROSS, SECTIONS = 4, 4
BLOCK, HEAD, WHOLE, LAST = 32 * 1024, 7, 1, 4


def records(path: Path) -> Iterator[Record]:
    """Reads what an offline run would upload: a log in LevelDB's format, after a head of 7 bytes."""
    data, at, text = path.read_bytes(), 7, b""
    while at + HEAD <= len(data):
        if (left := BLOCK - at % BLOCK) < HEAD:  # the end of a block that is too short for a head is empty
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        text += data[at + HEAD : at + HEAD + length]
        at += HEAD + length
        if kind in (WHOLE, LAST):
            record = Record()
            record.ParseFromString(text)
            text = b""
            yield record


def read(path: Path) -> tuple[str, dict[str, dict[int, float]]]:
    """Returns the group of a run, and its history by column and round."""
    group, columns = "", defaultdict[str, dict[int, float]](dict)
    for record in records(path):
        if record.HasField("run"):
            group = record.run.run_group or group
        if record.HasField("history"):
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            media = {name.removesuffix("/_type") for name in row if name.endswith("/_type")}
            for name, value in row.items():
                if "round" in row and name.rpartition("/")[0] not in media and not name.startswith(("_", "trainer/")):
                    columns[name][int(row["round"])] = float(value)
    return group, columns


def draw(axes: Any, groups: dict[str, list[dict[str, dict[int, float]]]], name: str) -> None:
    """Draws one chart."""
    for group, runs in sorted(groups.items()):
        curves = [run[name] for run in runs if name in run]
        rounds = sorted(set.intersection(*map(set, curves))) if curves else []
        if not rounds:
            continue
        means = [statistics.fmean(curve[at] for curve in curves) for at in rounds]
        spread = [statistics.pstdev([curve[at] for curve in curves]) for at in rounds]
        low, high = zip(*((m - s, m + s) for m, s in zip(means, spread, strict=True)), strict=True)
        (line,) = axes.plot(rounds, means, label=f"{group} ({len(curves)})", linewidth=1.2)
        axes.fill_between(rounds, low, high, alpha=0.2, color=line.get_color())
    axes.set_title(name, fontsize=8)
    axes.set_xlabel("round", fontsize=7)
    axes.tick_params(labelsize=6)


def main() -> None:
    """Writes the picture."""
    groups = defaultdict[str, list[dict[str, dict[int, float]]]](list)
    for path in sorted(Path(sys.argv[1]).rglob("run-*.wandb")):
        group, columns = read(path)
        groups[group].append(columns)
    sections = list(sections_of(name for runs in groups.values() for run in runs for name in run).items())[:SECTIONS]
    figure, grid = subplots(
        len(sections), ACROSS, figsize=(12, 2.3 * len(sections)), layout="constrained", squeeze=False
    )
    for row, (section, names) in zip(grid, sections, strict=True):
        for at, axes in enumerate(row):
            if at < len(names):
                draw(axes, groups, names[at])
            else:
                axes.axis("off")
        row[0].set_ylabel(section, fontsize=10)
    grid[0][0].legend(fontsize=6)
    save(figure, IMAGE, dpi=90)


if __name__ == "__main__":
    main()
