"""A client's own model of a finished run, in an ordinary module."""

from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn

from lightning_fed.client_algorithms import ClientAlgorithm
from lightning_fed.core.buffers import GlobalBuffers
from lightning_fed.core.client_states import FOLDER, ClientStates
from lightning_fed.core.train_state import PERSONAL
from lightning_fed.core.updates import Client
from lightning_fed.core.vector import ParameterVector
from lightning_fed.errors import FederatedError, expect
from lightning_fed.lab.report.page import run_config
from lightning_fed.runs.checkpoint_files import expect_layout, read_checkpoint
from lightning_fed.trainer.checkpoint_contents import load_weights

__all__ = ["load_client_model"]


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
