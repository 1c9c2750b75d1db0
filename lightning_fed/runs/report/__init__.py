"""Tables and pictures over the folders of finished runs."""

from lightning_fed.runs.report.load import MeasuredRun, Method, group_runs, load_runs
from lightning_fed.runs.report.plots import curves_figure
from lightning_fed.runs.report.tables import Row, Summary, format_table, method_rows, summarize, write_csv

__all__ = [
    "Method",
    "Row",
    "MeasuredRun",
    "Summary",
    "curves_figure",
    "format_table",
    "group_runs",
    "load_runs",
    "method_rows",
    "summarize",
    "write_csv",
]
