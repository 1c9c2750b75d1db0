"""Checkpoints: what a run must remember between two rounds, as tensors and primitives only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Timer
from torch import Tensor

from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.core.client_states import FOLDER
from lightning_fed.errors import FederatedError
from lightning_fed.runs.checkpoints import expect_primitives, primitives_of

if TYPE_CHECKING:
    from lightning_fed.trainer import FederatedTrainer
    from lightning_fed.trainer.setup import TrainerSession

__all__ = ["dump_state", "load_weights", "restore_state"]

_FORMAT = 1


def dump_state(trainer: FederatedTrainer) -> dict[str, Any]:
    """Gathers the checkpoint of the last finished round, in Lightning's layout with one more key, ``federated``.

    Raises:
        FederatedError: If a callback or the module adds something other than tensors and primitives.
    """
    module = trainer.lightning_module
    assert module is not None
    gather = trainer.processes.exchange if trainer.world_size > 1 else None
    checkpoint: dict[str, Any] = {
        "epoch": trainer.round,
        "global_step": trainer.steps_before_round,
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": {name: value.detach().clone() for name, value in module.state_dict().items()},
        "loops": {},
        "callbacks": {cb.state_key: state for cb in trainer.callbacks if (state := cb.state_dict())},
        "hparams_name": "kwargs",
        "hyper_parameters": primitives_of(dict(module.hparams)),
        "federated": {
            "format": _FORMAT,
            "round": trainer.round,
            # Only where the module's own precision is narrower than the global vector's.
            "weights": trainer.weights.clone() if trainer.weights.dtype != trainer.vector.dtype else None,
            "buffers": trainer.buffers.state_dict(gather),
            "optimizer": trainer.local_optimizer.state_dict() if trainer.local_optimizer is not None else {},
            "totals": dict(trainer.totals),
            "metrics": vars(trainer.metrics),
            "client_states": trainer.client_states.dump(trainer.processes.exchange),
            "layout": _layout(trainer),
            "split_hash": getattr(trainer.datamodule, "split_hash", None),
            "methods": _methods(trainer),
            "should_stop": bool(trainer.should_stop) and not _out_of_time(trainer),
        },
    }
    for callback in trainer.callbacks:
        callback.on_save_checkpoint(trainer, module, checkpoint)  # type: ignore[arg-type]  # the facade stands in
    module.on_save_checkpoint(checkpoint)
    expect_primitives(checkpoint, "")
    return checkpoint


def _methods(trainer: Any) -> list[str]:
    """Names the aggregator, the mask and the client algorithms: a checkpoint is resumed by the same ones."""
    algorithms = sorted(type(cb).__name__ for cb in trainer.callbacks if isinstance(cb, ClientAlgorithm))
    return [str(trainer.aggregator.label), *algorithms]


def _layout(trainer: Any) -> list[list[int]]:
    """The strides of the parameters in the flat vector, which order the numbers of every vector of a run."""
    return [list(p.stride()) for p in trainer.vector.parameters]


def _out_of_time(trainer: FederatedTrainer) -> bool:
    """Says whether a depleted Timer asked for the stop: a resumed run that is given more time goes on."""
    timers = [cb for cb in trainer.callbacks if isinstance(cb, Timer)]
    return any((left := timer.time_remaining()) is not None and left <= 0 for timer in timers)


def load_weights(module: LightningModule, checkpoint: dict[str, Any], source: str, option: str) -> None:
    """Loads the weights of a checkpoint or a plain ``state_dict`` into a module.

    Args:
        module: The module, changed in place.
        checkpoint: What ``read_checkpoint`` returned.
        source: The file, for messages.
        option: The option that named it, for messages.

    Raises:
        FederatedError: If names or shapes are another model's.
    """
    if "state_dict" in checkpoint:  # as Lightning does: the hook may change what is loaded
        module.on_load_checkpoint(checkpoint)
    state: dict[str, Tensor] = checkpoint.get("state_dict", checkpoint)
    own = module.state_dict()
    if not module.strict_loading:
        state = {name: value for name, value in state.items() if name in own}
        own = {name: value for name, value in own.items() if name in state}
    wrong = sorted(set(own) ^ set(state)) + [
        name for name in own if name in state and getattr(state[name], "shape", None) != own[name].shape
    ]
    if wrong:
        raise FederatedError(
            f"Expected {source} to hold the weights of this {type(module).__name__}, but {len(wrong)} of its tensors "
            f"are missing, unknown or of another shape, such as `{wrong[0]}`: change `--model` or `{option}`."
        )
    module.load_state_dict(state, strict=module.strict_loading)


def restore_state(trainer: TrainerSession, checkpoint: dict[str, Any], source: str) -> None:
    """Restores a run from a checkpoint, in place; weights must have been loaded before.

    Raises:
        FederatedError: If it is no checkpoint of federated training, or lacks a part of this run.
    """
    state = checkpoint.get("federated")
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        raise FederatedError(
            f"Expected {source} to be a checkpoint of federated training to resume from: to start a new run from its "
            "weights give it as `--weights` instead of `--ckpt_path`."
        )
    split = getattr(trainer.datamodule, "split_hash", None)
    if state["split_hash"] != split:
        raise FederatedError(
            f"Expected the data split of the run that {source} is from ({str(state['split_hash'])[:12]}...), got "
            f"another ({str(split)[:12]}...): give the same `--data`, or start a new run with `--weights`."
        )
    methods = _methods(trainer)
    if state.get("methods", methods) != methods:  # its state would be missing, or another's left behind
        raise FederatedError(
            f"Expected the methods of the run that {source} is from, {', '.join(state['methods'])}, got "
            f"{', '.join(methods)}: give the same `--aggregator` and `--client`, or start a new run with `--weights`."
        )
    layout = _layout(trainer)
    if state.get("layout", layout) != layout:
        raise FederatedError(
            f"Expected the memory layout of the run that {source} is from, as its vectors have the order of the "
            "parameters in memory: give the same `--trainer.memory_format`, or start a new run with `--weights`."
        )
    trainer.weights.copy_(trainer.vector.data if state["weights"] is None else state["weights"])
    trainer.buffers.load_state_dict(state["buffers"])
    assert trainer.local_optimizer is not None
    trainer.local_optimizer.load_state_dict(state["optimizer"])
    trainer.totals.update(state["totals"])
    vars(trainer.metrics).update(state["metrics"])
    trainer.round = state["round"]
    trainer.steps_before_round = checkpoint["global_step"]
    folder = Path(source).absolute().parent.parent / FOLDER
    trainer.client_states.restore(state.get("client_states", []), folder)
    trainer.should_stop = state["should_stop"]
    module = trainer.lightning_module
    assert module is not None
    for callback in trainer.callbacks:
        callback.on_load_checkpoint(trainer, module, checkpoint)  # type: ignore[arg-type]  # the facade stands in
        if callback.state_key in checkpoint["callbacks"]:
            callback.load_state_dict(checkpoint["callbacks"][callback.state_key])
    trainer.finished_round = trainer.round  # at last: until here nothing of this run could be kept
