"""The command ``lightning-fed dashboard RUNS... [--entity NAME] [--project NAME]``."""

import os
from pathlib import Path
from typing import Any

from lightning_fed.errors import FederatedError
from lightning_fed.lab.common import CommandParser
from lightning_fed.lab.report.dashboard import build_report, build_workspace
from lightning_fed.lab.report.load import load_runs
from lightning_fed.runs.loggers import logged_in

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Builds a workspace and a report for the columns of some runs, saves both and prints where they are; returns 0."""
    parser = CommandParser(
        prog="lightning-fed dashboard",
        description="Arranges runs at Weights & Biases: a workspace and a report with a section for each prefix.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="folders of runs, or folders above them")
    parser.add_argument("--entity", help="user or team at Weights & Biases (default: that of the login)")
    parser.add_argument(
        "--project", default=os.environ.get("WANDB_PROJECT", "lightning_fed"), help="(default: %(default)s)"
    )
    options = parser.parse_args(argv)
    runs, _ = load_runs(options.runs)
    if not logged_in():
        raise FederatedError(
            "Expected a login at Weights & Biases for a dashboard: run `wandb login`, and `wandb sync` for what was "
            "kept offline, or look at the runs without an account by `lightning-fed report RUNS --format html`."
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
    except Exception as error:  # of the library, in classes of its own
        why = " ".join(str(error).split()) or type(error).__name__
        raise FederatedError(
            f"Expected Weights & Biases to take the dashboard, but it says: {why}; see to `--entity` and `--project`."
        ) from error
    return 0
