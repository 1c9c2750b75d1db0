"""The command ``lightning-fed dashboard RUNS... [--entity NAME] [--project NAME]``."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_fed.errors import FederatedError, import_extra
from lightning_fed.lab.common import CommandParser
from lightning_fed.lab.report.runs import load_runs
from lightning_fed.runs.loggers import logged_in

__all__ = ["build_report", "build_workspace", "main", "make_parser", "sections_of"]

# The first sections, in this order; the others follow by name.
_FIRST = ("test", "val", "train", "per_client", "agreement", "mask", "update", "gradient")
_ACROSS = 3


def main(argv: list[str]) -> int:
    """Builds a workspace and a report for the columns of some runs, saves both and prints their URLs; returns 0."""
    options = make_parser().parse_args(argv)
    runs, _ = load_runs(options.runs)
    if not logged_in():
        raise FederatedError(
            "Expected a login at Weights & Biases: run `wandb login`, and `wandb sync` for offline runs."
        )
    columns = {name for run in runs for name in run.columns}
    try:
        import wandb

        entity: Any = options.entity or wandb.Api().default_entity
        workspace = build_workspace(entity, options.project, columns)
        report = build_report(entity, options.project, columns, sorted({run.label for run in runs}))
        print(f"workspace: {workspace.save().url}\nreport: {report.save().url}")
    except FederatedError:
        raise
    except Exception as error:  # wandb has its own exception classes
        why = " ".join(str(error).split()) or type(error).__name__
        raise FederatedError(
            f"Expected Weights & Biases to accept the dashboard, but it says: {why}; check `--entity` and `--project`."
        ) from error
    return 0


def make_parser() -> CommandParser:
    """Makes the parser of this command."""
    parser = CommandParser(
        prog="lightning-fed dashboard",
        description="Arranges runs at Weights & Biases: a workspace and a report, with a section for each prefix.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="folders of runs, or folders above them")
    parser.add_argument("--entity", help="user or team at Weights & Biases (default: that of your login)")
    parser.add_argument(
        "--project", default=os.environ.get("WANDB_PROJECT", "lightning_fed"), help="(default: %(default)s)"
    )
    return parser


def sections_of(columns: Iterable[str]) -> dict[str, list[str]]:
    """Groups columns of metrics.csv by the prefix of their names; those without a prefix come last."""
    found: dict[str, list[str]] = {}
    for name in sorted({*columns} - {"round"}):
        prefix, slash, _ = name.partition("/")
        found.setdefault(prefix if slash else "others", []).append(name)
    rank = {name: at for at, name in enumerate(_FIRST)}
    return {name: found[name] for name in sorted(found, key=lambda n: (n == "others", rank.get(n, len(rank)), n))}


def _library(part: str) -> Any:
    return import_extra(f"wandb_workspaces.{part}", "dashboard", "`lightning-fed dashboard`")


def _curves(reports: Any, columns: Sequence[str]) -> list[Any]:
    """Makes a chart over rounds for each column, with a line for each group: mean over seeds and a band of one std."""
    return [
        reports.LinePlot(
            title=name, x="round", y=[name], aggregate=True, groupby_aggfunc="mean", groupby_rangefunc="stddev",
            layout=reports.Layout(x=at % _ACROSS * 8, y=at // _ACROSS * 6, w=8, h=6),
        )
        for at, name in enumerate(columns)
    ]  # fmt: skip


def build_workspace(entity: str, project: str, columns: Iterable[str]) -> Any:
    """Builds a workspace with a section for each prefix and with runs grouped by method; does not save it."""
    reports, workspaces = _library("reports.v2"), _library("workspaces")
    sections = [
        workspaces.Section(name=name, panels=_curves(reports, names), is_open=name in _FIRST[:2])
        for name, names in sections_of(columns).items()
    ]
    return workspaces.Workspace(
        entity=entity, project=project, name="Federated runs", sections=sections,
        settings=workspaces.WorkspaceSettings(x_axis="round", smoothing_type="none"),
        runset_settings=workspaces.RunsetSettings(groupby=[workspaces.Metric("Group")]),
    )  # fmt: skip


def build_report(entity: str, project: str, columns: Iterable[str], methods: Sequence[str]) -> Any:
    """Builds a report with the same sections, bars of the best values, and the pictures; does not save it.

    Its text names the methods by their labels.
    """
    reports = _library("reports.v2")
    sections = sections_of(columns)
    runs = reports.Runset(entity=entity, project=project, name="Runs", groupby=["Group"])
    evaluated = [name for prefix in ("test", "val") for name in sections.get(prefix, [])]
    bars = [reports.BarPlot(title=f"best {name}", metrics=[f"{name}.best"], groupby="Group") for name in evaluated]
    pictures = reports.MediaBrowser(media_keys=["split", "sizes", "samples"])
    blocks: list[Any] = [
        reports.P(f"Methods: {', '.join(methods)}. Lines are means over seeds, bands one standard deviation."),
        reports.H1("Summary"),
        reports.PanelGrid(runsets=[runs], panels=[*bars, pictures]),
    ]
    for name, names in sections.items():
        blocks += [reports.H1(name), reports.PanelGrid(runsets=[runs], panels=_curves(reports, names))]
    return reports.Report(entity=entity, project=project, title="Federated runs", blocks=blocks)
