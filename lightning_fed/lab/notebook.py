"""Runs, data and trainers in a notebook: the rounds of runs as a data frame, a client's own model, and their HTML."""

from __future__ import annotations

import json
import warnings
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import suppress
from html import escape
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn

from lightning_fed.client_algorithms import ClientAlgorithm
from lightning_fed.core.buffers import GlobalBuffers
from lightning_fed.core.client_states import FOLDER, ClientStates
from lightning_fed.core.files import png
from lightning_fed.core.seeding import isolated_streams
from lightning_fed.core.train_state import PERSONAL
from lightning_fed.core.updates import Client
from lightning_fed.core.user_code import describe
from lightning_fed.core.vector import ParameterVector
from lightning_fed.data import FederatedDataModule
from lightning_fed.data.summary import facts, split_figures
from lightning_fed.errors import FederatedError, expect, import_extra
from lightning_fed.lab.report.page import differing, html_table, run_config, run_options
from lightning_fed.lab.report.plots import panels_figure
from lightning_fed.lab.report.runs import PREFERRED, MeasuredRun, Method, counted, read_metrics
from lightning_fed.lab.report.runs import load_runs as read_runs
from lightning_fed.runs.checkpoint_files import expect_layout, read_checkpoint
from lightning_fed.runs.folder import RunFolder
from lightning_fed.runs.statistics import run_statistic
from lightning_fed.trainer import FederatedTrainer
from lightning_fed.trainer.checkpoint_contents import load_weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

__all__ = ["html", "load_client_model", "load_runs"]

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
    runs, notes = read_runs(map(Path, folders))
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
    columns = read_metrics(folder.metrics)
    where = f"<b>{escape(folder.label)}</b>, seed {folder.seed}, in <code>{escape(str(folder.path))}</code>"
    measured = [name for name in PREFERRED if name in columns]
    if not measured:
        yield f"<p>{where}: nothing is measured yet.</p>"
        return
    yield f"<p>{where}: {max(max(curve) for curve in columns.values())} rounds</p>"
    run = MeasuredRun(**{**vars(folder), "columns": columns})
    lines = [
        [name, *(f"{run_statistic(columns[name], which, name):.4g}" for which in ("final", "best"))]
        for name in measured
    ]
    figure = panels_figure({("", measured[0]): {0: Method(folder.label, (run,))}})
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


def load_client_model(
    run_folder: str | Path, client: str | int, module: LightningModule, checkpoint: str = "last"
) -> LightningModule:
    """Loads into a module what a client has for itself after a run: its own model, or the global one with its part.

    It is the model that ``own`` in ``models`` of ``ClientEvaluation`` evaluates. Nothing in the folder is run as code:
    the class of a client algorithm of yours must be imported before.

    Args:
        run_folder: The run's folder, as ``trainer.run.path`` or the column ``run`` of ``load_runs``.
        client: Its name, where the data have names, or its number in ``clients.csv``.
        module: A module as the run's was when ``fit`` began; its weights are replaced in place.
        checkpoint: Which of the run's checkpoints: ``last``, ``best``, or another file's name.

    Returns:
        The module, an ordinary one; for a client that has not trained yet, with the global model, of which you are
        warned.
    """
    path = Path(run_folder) / "checkpoints" / f"{checkpoint.removesuffix('.ckpt')}.ckpt"
    content = read_checkpoint(path, "checkpoint")
    expect_layout(content, str(path))
    state = content["federated"]
    number, kept = _number_of(state, client), state["buffers"]["of_client"]
    algorithm = _algorithm(Path(run_folder), state["methods"])
    if not (algorithm or kept):
        raise FederatedError(
            f"Expected a run whose clients keep models of their own, got {' with '.join(state['methods'])}: load the "
            f"global model, as `{type(module).__name__}.load_from_checkpoint({str(path)!r})`."
        )
    records = {file.partition("-")[0] for file in state["client_states"]}
    if number not in kept and not any(record.endswith(f"/{number}") for record in records):
        rank_zero_warn(f"Client {client} has not trained in this run: its model is the global one.")
    load_weights(module, content, str(path), "module")
    if channels_last := state.get("memory_format") == "channels_last":
        module.to(memory_format=torch.channels_last)
    vector = ParameterVector(module, state.get("personal", ()))
    if [list(p.stride()) for p in vector.all_parameters] != state["layout"]:
        raise FederatedError(
            f"Expected a `module` with the {len(state['layout'])} trained parameters of the run, got "
            f"{len(vector.all_parameters)} that require a gradient, or others: freeze those that the run had frozen."
        )
    _put_in(vector, module, state, Path(run_folder) / FOLDER, algorithm, number)
    vector.release()
    return module.to(memory_format=torch.contiguous_format) if channels_last else module


def _number_of(state: dict[str, Any], client: str | int) -> int:
    """Returns the number of a client that is given by its name or number."""
    known = state.get("clients")  # a list of names, or how many there are
    names = known if isinstance(known, list) else []
    if client in names:
        return int(names.index(client))
    last = (len(names) or known or 1 << 31) - 1
    if str(client).isdecimal() and int(client) <= last:
        return int(client)
    called = f"its name ({', '.join(names if last < 8 else (*names[:3], '...', *names[-3:]))}) or " if names else ""
    raise FederatedError(
        f"Expected `client` to be a client that trains, by {called}its number (0 to {last}), got {client!r}."
    )


def _algorithm(folder: Path, methods: list[str]) -> ClientAlgorithm | None:
    """Makes the run's algorithm whose clients have own models, of its class in memory and its options on disk."""
    given = run_config(folder).get("client") or []
    for spec in [given] if isinstance(given, dict) else given:
        name = str(spec.get("class_path")).rpartition(".")[2]
        kind = next((kind for kind in _below(ClientAlgorithm) if kind.__name__ == name), None)
        expect(kind is not None or name not in methods, f"Expected the class {name} of the run: import it before.")
        if kind is not None and kind.has_own_model and name in methods:
            wanted = signature(kind).parameters  # a run from Python describes those of its bases too
            return kind(**{name: value for name, value in (spec.get("init_args") or {}).items() if name in wanted})
    return None


def _below(kind: type[ClientAlgorithm]) -> Iterator[type[ClientAlgorithm]]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)


def _put_in(
    vector: ParameterVector, module: LightningModule, state: dict[str, Any], folder: Path,
    algorithm: ClientAlgorithm | None, client: int,
) -> None:  # fmt: skip
    """Puts in a client's buffers, and lets the algorithm put in its model, with what it reads of a trainer for that."""
    wide = vector.data.to(torch.promote_types(vector.dtype, torch.float32), copy=True)
    weights = wide if state["weights"] is None else state["weights"]
    states, initial = ClientStates("host", weights), vector.personal.clone()
    states.restore(state["client_states"], folder)
    buffers = GlobalBuffers(module, "local", vector.all_names)
    buffers.load_state_dict(state["buffers"])
    buffers.load(Client(client, 0, state["round"]))

    def load_own(client: int) -> None:
        if not states.recall(PERSONAL, client, vector.personal):
            vector.personal.copy_(initial)

    if algorithm is not None:
        trainer: Any = SimpleNamespace(weights=weights, vector=vector, client_states=states, round=state["round"])
        trainer.train_state = SimpleNamespace(load_own=load_own)
        algorithm.load_own(trainer, client)
