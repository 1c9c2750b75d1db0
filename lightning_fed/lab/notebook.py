"""The HTML by which notebooks show data, a trainer or a run, and the rounds of runs as a pandas data frame."""

from __future__ import annotations

import json
import warnings
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fed.client_algorithms import ClientAlgorithm
from lightning_fed.core.files import png
from lightning_fed.core.seeding import isolated_streams
from lightning_fed.core.user_code import describe
from lightning_fed.data import FederatedDataModule
from lightning_fed.data.summary import facts, split_figures
from lightning_fed.errors import import_extra
from lightning_fed.lab.report import load
from lightning_fed.lab.report.page import differing, html_table, run_options
from lightning_fed.lab.report.plots import panels_figure
from lightning_fed.lab.report.summary import PREFERRED, counted
from lightning_fed.runs.folder import RunFolder
from lightning_fed.runs.statistics import run_statistic
from lightning_fed.trainer import FederatedTrainer

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

__all__ = ["html", "load_runs"]

# Facts about a split that are left out of the small table.
_NO_PLACE = ("data", "label entropy", "label divergence", "memory", "hash")


def load_runs(*folders: str | Path) -> DataFrame:
    """Returns the rounds of runs as a pandas data frame: a row for each run and round.

    Args:
        *folders: Folders of runs, or any folders above, such as ``"runs"``.

    Returns:
        A data frame with the columns ``run`` (its folder), ``method``, ``seed``, the options that differ between the
        runs (by their names on the command line), ``round``, and all columns of the runs' ``metrics.csv``. NaN means
        not measured in that round. You get a warning for each run that is left out.

    Raises:
        FederatedError: If there is no run with measurements, or pandas is not installed.
    """
    pandas = import_extra("pandas", "notebook", "`load_runs`")
    runs, notes = load.load_runs(map(Path, folders))
    for note in notes:
        warnings.warn(note, stacklevel=2)
    options = [run_options(run.path) for run in runs]
    names, rows = differing(options), []
    for run, own in zip(runs, options, strict=True):
        about = {"run": str(run.path), "method": run.label, "seed": run.seed}
        about |= {name: _value(own.get(name)) for name in names}
        for at in sorted({at for column in run.columns.values() for at in column}):
            measured = {name: column[at] for name, column in run.columns.items() if at in column}
            rows.append({**about, "round": at, **measured})
    return pandas.DataFrame(rows)


def _value(text: str | None) -> Any:
    """Converts the text of an option to a number or a truth value, if it is one."""
    with suppress(ValueError, TypeError, RecursionError):
        found = json.loads(text or "")
        return found if found is None or isinstance(found, (bool, int, float)) else text
    return text


def html(shown: Any) -> str:
    """Returns a data module, a trainer or a run as HTML; a data set that is not loaded yet stays so.

    An error is shown instead of the HTML, and random states do not change.
    """
    forms = ((FederatedDataModule, _data), (FederatedTrainer, _trainer), (RunFolder, _run))
    try:
        form = next(form for kind, form in forms if isinstance(shown, kind))
        with isolated_streams():
            return "\n".join(form(shown))
    except Exception as error:  # a notebook cell must not fail because of its display
        return f"<p><b>{type(shown).__name__}</b> cannot be shown ({escape(f'{type(error).__name__}: {error}')}).</p>"


def _data(data: FederatedDataModule) -> Iterator[str]:
    name, divided = type(data.source or data).__name__, data._clients
    if divided is None or divided.division.seed != data._context()[1]:
        yield f"<p><b>{name}</b>: call <code>setup()</code> to load the data and to see how they are split.</p>"
        return
    lines = [[fact, text] for fact, text in facts(data).items() if fact not in _NO_PLACE]
    figure = next(figure for _, figure in split_figures(data, data.train_source()))
    yield _beside(_picture(figure, f"The split of {name} over clients"), html_table([["", name], *lines]))


def _trainer(trainer: FederatedTrainer) -> Iterator[str]:
    options, share = trainer.options, trainer.options.clients_per_round
    drawn = f"{share:.0%} of the clients" if isinstance(share, float) else f"{share} clients"
    count, unit = (options.local_steps or 0, "step") if options.epochs is None else (options.epochs, "epoch")
    engine = trainer.engine_choice or {"engine": trainer.engine, "reason": "chosen when fit begins"}
    lines = {
        "rounds": str(options.max_rounds),
        "cohort": f"{drawn}, each trains for {counted(count, unit)}",
        "aggregator": _written(describe(trainer.aggregator)),
        "client algorithms": ", ".join(
            _written(describe(cb)) for cb in trainer.callbacks if isinstance(cb, ClientAlgorithm)
        ) or "none",
        "engine": f"{engine['engine']}: {engine['reason']}" if "reason" in engine else engine["engine"],
        "device": f"{trainer.fabric.device}, {trainer.precision}",
    }  # fmt: skip
    yield html_table([["", type(trainer).__name__], *map(list, lines.items())])
    if trainer.run is not None:
        yield from _run(trainer.run)


def _run(folder: RunFolder) -> Iterator[str]:
    columns = load.read_metrics(folder.metrics)
    where = f"<b>{escape(folder.label)}</b>, seed {folder.seed}, in <code>{escape(str(folder.path))}</code>"
    measured = [name for name in PREFERRED if name in columns]
    if not measured:
        yield f"<p>{where}: nothing is measured yet.</p>"
        return
    yield f"<p>{where}: {max(max(curve) for curve in columns.values())} rounds</p>"
    run = load.MeasuredRun(**{**vars(folder), "columns": columns})
    lines = [
        [name, *(f"{run_statistic(columns[name], which, name):.4g}" for which in ("final", "best"))]
        for name in measured
    ]
    figure = panels_figure({("", measured[0]): {0: load.Method(folder.label, (run,))}})
    yield _beside(_picture(figure, f"{measured[0]} by round"), html_table([["", "last", "best"], *lines]))


def _written(described: Any) -> str:
    """Writes an object as the Python call that makes it, without arguments that are None."""
    if not isinstance(described, Mapping) or "class_path" not in described:
        return repr(described)
    given = {name: value for name, value in described["init_args"].items() if value is not None}
    arguments = ", ".join(f"{name}={_written(value)}" for name, value in given.items())
    return f"{described['class_path'].rpartition('.')[2]}({arguments})"


def _beside(*parts: str) -> str:
    columns = "".join(f"<div>{part}</div>" for part in parts)
    return f'<div style="display: flex; flex-wrap: wrap; gap: 2em; align-items: center">{columns}</div>'


def _picture(figure: Figure, what: str) -> str:
    data = b64encode(png(figure)).decode()
    return f'<img alt="{escape(what)}" src="data:image/png;base64,{data}" style="max-width: 30em">'
