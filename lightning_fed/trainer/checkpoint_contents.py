"""Checkpoints: everything that a run needs to resume between two rounds, as tensors and primitives only."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.core.client_states import FOLDER
from lightning_fed.core.files import WriteError
from lightning_fed.core.hooks import is_stock
from lightning_fed.core.train_state import TrainState
from lightning_fed.data.source_module import is_datamodule
from lightning_fed.errors import FederatedError
from lightning_fed.runs.checkpoint_files import FORMAT, expect_parts, primitives_of, save_checkpoint, seal_of
from lightning_fed.runs.folder import LAST_GOOD, RunFolder
from lightning_fed.runs.loggers import RoundCSVLogger
from lightning_fed.trainer.lightning_names import LightningNames

__all__ = ["load_weights", "restore_data", "restore_state", "save_checkpoints", "save_last_good", "save_model"]

# Parts of a checkpoint of which a value that cannot be stored is left out alone.
_ONE_BY_ONE = ("callbacks", "hyper_parameters", "datamodule_hyper_parameters")


def save_checkpoints(trainer: LightningNames, run: RunFolder, paths: Sequence[Path]) -> None:
    """Writes the checkpoint of the last finished round to these files, one after the other, between two rounds.

    Raises:
        WriteError: On all processes, if the system refuses a file; ``written`` lists the files before it.
    """
    checkpoint = _dump(trainer)
    written: list[Path] = []

    def write() -> WriteError | None:
        try:
            for table in (logger for logger in trainer.loggers if isinstance(logger, RoundCSVLogger)):
                table.make_durable()
            for path in paths:
                save_checkpoint(checkpoint, path)
                written.append(path)
                if path.parent.absolute() == run.checkpoints.absolute():
                    trainer.client_states.saved(path.stem, {file.stem for file in run.kept()})
                    with suppress(OSError):  # from an earlier round, so no longer needed
                        (run.checkpoints / f"{LAST_GOOD}.ckpt").unlink(missing_ok=True)
        except WriteError as error:
            error.written = written
            trainer.client_states.remove_unused()  # otherwise each round would leave more files on a full disk
            return error
        return None

    refused = trainer.processes.from_first(write, "checkpoint")
    if refused is not None:
        raise refused


def save_model(trainer: LightningNames, path: Path) -> None:
    """Writes only the model, in Lightning's layout: its weights and hyper-parameters."""
    if isinstance(trainer.train_state, TrainState):
        if trainer.client is not None and not trainer.interrupted_or_failed:
            raise FederatedError(
                "Expected `save_checkpoint` while the module holds the global model, got a call while a client trains: "
                "call it in a hook of a round, such as `on_train_epoch_end`."
            )
        if trainer.interrupted_or_failed:
            trainer.train_state.load_global_model()
    if trainer.is_global_zero:
        checkpoint = _model_of(trainer)
        trainer.lightning_module.on_save_checkpoint(checkpoint)  # as Lightning does, which then asks no callbacks
        save_checkpoint(_storable(checkpoint), path)


def save_last_good(trainer: LightningNames, folder: Path) -> None:
    """Writes ``last_good.ckpt``: only the weights of the global model, for ``--weights``.

    The state of client algorithms is left out, because the failed round may have changed it.
    """
    if not (trainer.is_global_zero and trainer.weights.isfinite().all()):
        return
    trainer.train_state.load_global_model()
    try:
        save_checkpoint(_weights_of(trainer.lightning_module), folder / f"{LAST_GOOD}.ckpt")
    except (OSError, WriteError) as error:  # a warning only: the run's own failure must be shown
        round = trainer.finished_round
        rank_zero_warn(f"The model of round {round} could not be written to last_good.ckpt: {error}")


def _weights_of(module: LightningModule) -> dict[str, Any]:
    """Copies a module's state, tensors in torch's usual memory layout, whatever their layout in training."""
    usual = {torch.strided: torch.contiguous_format}
    copies = {
        name: value.detach().clone(memory_format=usual.get(value.layout, torch.preserve_format))
        if isinstance(value, Tensor) else value  # of `get_extra_state`
        for name, value in module.state_dict().items()
    }  # fmt: skip
    return primitives_of(copies, "state_dict")


def _data_modules(trainer: LightningNames) -> list[Any]:
    """Returns the run's data module, and the user's own in it if it has one as its source."""
    data = trainer.datamodule
    return [part for part in (data, getattr(data, "source", None)) if is_datamodule(part)]


def _fresh_states(optimizers: list[Any]) -> list[dict[str, Any]]:
    """Returns what Lightning saves of optimizers, as clients find them; nothing if one lacks what torch gives each."""
    with suppress(AttributeError):
        return [{**each.state_dict(), "state": {}} for each in optimizers]
    return []


def _model_of(trainer: LightningNames) -> dict[str, Any]:
    """Gathers the parts of Lightning's checkpoints that model and data have, and those that hooks may remove."""
    module, data = trainer.lightning_module, _data_modules(trainer)
    checkpoint = {
        "epoch": trainer.round,
        "global_step": trainer.train_state.steps_before_round,
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": _weights_of(module),
        "loops": None,  # Lightning's trainer would load these if there were any
        "callbacks": {},
        "optimizer_states": _fresh_states(trainer.optimizers),
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        **{type(part).__qualname__: state for part in data if (state := part.state_dict())},
    }
    for part in (module, *data):
        if part.hparams:
            checkpoint[part.CHECKPOINT_HYPER_PARAMS_KEY] = dict(part.hparams)
            if hasattr(part, "_hparams_name"):
                checkpoint[part.CHECKPOINT_HYPER_PARAMS_NAME] = part._hparams_name
    return checkpoint


def _dump(trainer: LightningNames) -> dict[str, Any]:
    """Gathers a checkpoint in Lightning's layout, with one more key, ``federated``."""
    of_fit = trainer.train_state.state_dict(trainer.processes.exchange)
    keeps = of_fit["client_states"] or of_fit["buffers"]["of_client"]
    names = trainer.train_state.client_names() if keeps else None
    checkpoint: dict[str, Any] = {
        **_model_of(trainer),
        "callbacks": {cb.state_key: state for cb in trainer.callbacks if (state := cb.state_dict())},
        "federated": {
            "format": FORMAT,
            **of_fit,
            "clients": len(trainer.train_state.source.sizes) if names is None else list(names),  # for their own models
            "metrics": vars(trainer.metrics),
            "split_hash": getattr(trainer.datamodule, "split_hash", None),
            "methods": _methods(trainer),
            "length": trainer.train_state.length,
            "should_stop": bool(trainer.should_stop) and not _out_of_time(trainer),
            "rows": next((log.checksum for log in trainer.loggers if isinstance(log, RoundCSVLogger)), None),
        },
    }
    trainer.hooks("on_save_checkpoint", checkpoint)
    stored = _storable(checkpoint)
    if "federated" in stored:
        stored["federated"]["seal"] = seal_of(stored)
    return stored


def _storable(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Turns a checkpoint into tensors and primitives: of callbacks and hyper-parameters each one that it can."""
    each = {n: part for n in _ONE_BY_ONE if isinstance(part := checkpoint.get(n), dict)}
    stored = primitives_of({name: part for name, part in checkpoint.items() if name not in each}, "")
    return {**stored, **{name: primitives_of(part, name) for name, part in each.items()}}


def _methods(trainer: LightningNames) -> list[str]:
    """Names the aggregator, mask, client algorithms and finetuning: a resumed run must have the same ones."""
    algorithms = sorted(type(cb).__name__ for cb in trainer.callbacks if isinstance(cb, ClientAlgorithm))
    finetuning = [type(cb).__name__ for cb in trainer.callbacks if is_stock(cb, "BaseFinetuning")]
    return [trainer.aggregator.label, *algorithms, *finetuning]


def _out_of_time(trainer: LightningNames) -> bool:
    """Returns whether a Timer ended the run: such a run goes on if it is resumed with more time."""
    timers = [cb for cb in trainer.callbacks if isinstance(cb, Timer)]
    return any((left := timer.time_remaining()) is not None and left <= 0 for timer in timers)


def load_weights(module: LightningModule, checkpoint: dict[str, Any], source: str, option: str) -> None:
    """Loads the weights of a checkpoint or a ``state_dict``, read from file ``source`` of ``option``, in place."""
    state: Any = checkpoint
    if not checkpoint.keys().isdisjoint(("state_dict", "pytorch-lightning_version")):
        module.on_load_checkpoint(checkpoint)  # as Lightning does: the hook may change what is loaded
        state = checkpoint.get("state_dict")
    own = module.state_dict()
    extra = {name: value for name, value in own.items() if name.rpartition(".")[2] == "_extra_state"}
    if not isinstance(state, dict):
        raise FederatedError(
            f"Expected {source} to hold weights by name, got a {type(state).__name__}: change `{option}`."
        )
    state = {**extra, **state}  # a checkpoint lacks what is more than primitives
    if not module.strict_loading:
        state = {name: value for name, value in state.items() if name in own}
        own = {name: value for name, value in own.items() if name in state}
    wrong = sorted(map(str, set(own) ^ set(state))) + [
        name
        for name, value in own.items()
        if name in state and name not in extra and getattr(state[name], "shape", None) != value.shape
    ]
    if wrong:
        raise FederatedError(
            f"Expected {source} to hold the weights of this {type(module).__name__}, but {len(wrong)} of its tensors "
            f"are missing, unknown or of another shape, such as `{wrong[0]}`: change `--model` or `{option}`."
        )
    module.load_state_dict(state, strict=module.strict_loading)


def restore_state(trainer: LightningNames, checkpoint: dict[str, Any], source: str) -> None:
    """Restores a run from a checkpoint with a checked layout, in place; load its weights before."""
    expect_parts(checkpoint, source)
    state = checkpoint["federated"]
    split = getattr(trainer.datamodule, "split_hash", None)
    if state["split_hash"] != split:
        raise FederatedError(
            f"Expected the same data split as in the run of {source} ({str(state['split_hash'])[:12]}...), got "
            f"another ({str(split)[:12]}...): give the same `--data`, or start a new run with `--weights`."
        )
    methods = _methods(trainer)
    if state["methods"] != methods:  # else state would be missing or unused
        raise FederatedError(
            f"Expected the same methods as in the run of {source}, {', '.join(state['methods'])}, got "
            f"{', '.join(methods)}: give the same `--aggregator`, `--client` and `--trainer.callbacks`, or start a new "
            "run with `--weights`."
        )
    length = state.get("length")
    if length is not None and length != trainer.options.max_rounds:
        raise FederatedError(
            f"Expected `--trainer.max_rounds {length}`, as in the run of {source}, whose module or method has read it, "
            f"as for a schedule, got {trainer.options.max_rounds}: to train for another number of rounds, start anew "
            "without `--ckpt_path`, or, in a study, with another `--output`."
        )
    own, kept = trainer.train_state.personal_names, state.get("personal", [])
    if own != kept:
        raise FederatedError(
            f"Expected the {len(kept)} parameters that stay with their clients in the run that {source} is from, got "
            f"{len(own)}, of which one differs by name (`{min(set(own) ^ set(kept), default=own)}`): give the same "
            "`--client` and `--model`, or start a new run with `--weights`."
        )
    if state["layout"] != trainer.train_state.layout:
        raise FederatedError(
            f"Expected the same memory layout as in the run of {source}, got another, which orders vectors "
            "differently: give the same `--trainer.memory_format`, or start a new run with `--weights`."
        )
    trainer.train_state.load_state_dict(state, Path(source).absolute().parent.parent / FOLDER)
    trainer.train_state.steps_before_round = checkpoint["global_step"]
    vars(trainer.metrics).update(state["metrics"])
    trainer.should_stop = state["should_stop"]
    trainer.hooks("on_load_checkpoint", checkpoint, module=False)
    for callback in trainer.callbacks:
        if callback.state_key in checkpoint["callbacks"]:
            _restore(callback, checkpoint["callbacks"][callback.state_key], source)
    trainer.train_state.load_global_model()
    trainer.train_state.epochs = trainer.round
    trainer.train_state.finished_round = trainer.round  # last: before this, the run had nothing to save


def restore_data(trainer: LightningNames, checkpoint: dict[str, Any], source: str) -> None:
    """Gives the data modules the states that a checkpoint has of them."""
    for part in _data_modules(trainer):
        if (name := type(part).__qualname__) in checkpoint:
            _restore(part, checkpoint[name], source)


def _restore(part: Any, state: Any, source: str) -> None:
    """Gives a callback or data module its state; turns any error, as only it can check it, into one sentence."""
    try:
        if is_stock(part, "ModelCheckpoint") and state.get("dirpath", part.dirpath) == part.dirpath:
            _expect_own_files(Path(part.dirpath), state, source)
        part.load_state_dict(state)
    except FederatedError:
        raise
    except Exception as error:
        raise FederatedError(
            f"Expected {source} to hold the state of {type(part).__name__}, which cannot load it "
            f"({type(error).__name__}: {error}): give another `--ckpt_path`, or the same class as before."
        ) from error


def _expect_own_files(folder: Path, state: dict[str, Any], source: str) -> None:
    """Refuses files elsewhere, because ModelCheckpoint would remove them once it has better ones."""
    for name in (*state.get("best_k_models", ()), state.get("kth_best_model_path"), state.get("last_model_path")):
        if name and folder.resolve() not in Path(name).resolve().parents:
            raise FederatedError(
                f"Expected {source} to name checkpoints in {folder}, got {str(name)[:300]!r}: it was not made by this "
                "run, give another `--ckpt_path`."
            )
