"""Checks of the trainer's arguments: one sentence for each mistake, before any work begins."""

import os
from datetime import timedelta
from pathlib import PurePosixPath
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_fed.errors import FederatedError, expect_choice, expect_count, is_count, is_number
from lightning_fed.sampling import ClientSampler

__all__ = ["batch_limit", "expect_datamodule", "expect_module", "validate_options"]


def validate_options(options: dict[str, Any]) -> None:
    """Checks the arguments of ``FederatedTrainer``.

    Args:
        options: The constructor's arguments by name.

    Raises:
        FederatedError: On the first argument that is out of range.
    """
    for name in ("max_rounds", "check_val_every_n_rounds", "accumulate_grad_batches", "num_nodes"):
        _expect_count(name, options[name])
    for name in ("local_epochs", "local_steps", "check_test_every_n_rounds", "full_gradient_batch_size", "chunk_size"):
        if options[name] is not None:
            _expect_count(name, options[name])
    for name in ("limit_val_batches", "limit_test_batches", "limit_predict_batches"):
        _expect_share(name, options[name], smallest=0)
    _expect_share("clients_per_round", options["clients_per_round"], smallest=1)
    if options["gradient_clip_algorithm"] is not None:
        _expect_choice("gradient_clip_algorithm", options["gradient_clip_algorithm"], ("norm", "value"))
    _expect_choice("local_schedule", options["local_schedule"], ("restart", "continue"))
    _expect_choice("deterministic", options["deterministic"], (True, False, "warn"))
    for name in ("enable_progress_bar", "enable_checkpointing", "full_gradient_weight_decay", "compile", "cuda_graphs"):
        _expect_choice(name, options[name], (True, False))
    _expect_choice("full_gradient_mode", options["full_gradient_mode"], ("eval", "train"))
    _expect_choice("engine", options["engine"], ("sequential", "vectorized", "auto"))
    _expect_choice("memory_format", options["memory_format"], ("preserve", "channels_last"))
    _expect_choice("client_states", options["client_states"], ("device", "host", "disk"))
    _expect_balance(options["balance"], options["deterministic"])
    share = options["max_diverged"]
    if not is_number(share, least=0, below=1):
        raise _error("max_diverged", "a share in [0, 1)", share)
    if options["local_epochs"] is not None and options["local_steps"] is not None:
        raise FederatedError(
            "Expected either `--trainer.local_epochs` or `--trainer.local_steps`, got both: leave one out."
        )
    if options["cuda_graphs"] and options["engine"] != "sequential":
        raise FederatedError(
            "Expected `--trainer.cuda_graphs true` with `--trainer.engine sequential`, as a graph is the step of one "
            f"client and auto tries it by itself, got {options['engine']}: leave one of the two out."
        )
    _expect_numbers(options)
    _expect_places(options["default_root_dir"], options["name"])
    _expect_parts(options["sampler"], options["logger"])
    if options["max_time"] is not None:
        _expect_duration(options["max_time"])


def batch_limit(limit: int | float, total: int | None) -> int | None:
    """Turns a count or a fraction into a number of batches.

    Args:
        limit: A count (int) or a fraction in [0, 1] (float).
        total: Batches that the loader has, None if it does not say.

    Returns:
        The largest number of batches to run, None for no limit.

    Raises:
        FederatedError: If a fraction above 0 comes to no batch, or is asked of a loader without a length.
    """
    if not isinstance(limit, float):
        return limit
    if limit == 1.0:
        return None
    if total is None or (limit > 0 and int(limit * total) == 0):
        got = "a loader without a length" if total is None else f"only {total} batches"
        raise FederatedError(
            f"Expected a fraction given as `--trainer.limit_val_batches`, `limit_test_batches` or "
            f"`limit_predict_batches` to come to at least one batch, got {limit} of {got}: give a count instead."
        )
    return int(limit * total)


def _error(name: str, expected: str, value: Any) -> FederatedError:
    return FederatedError(f"Expected `--trainer.{name}` to be {expected}, got {value!r}.")


def _expect_count(name: str, value: Any) -> None:
    expect_count(f"--trainer.{name}", value)


def _expect_share(name: str, value: Any, smallest: int) -> None:
    is_share = isinstance(value, float) and 0 <= value <= 1 and (smallest == 0 or value > 0)
    if not (is_count(value, smallest) or is_share):
        lower = "[0" if smallest == 0 else "(0"
        raise _error(name, f"a count (an integer of at least {smallest}) or a fraction in {lower}, 1]", value)


def _expect_numbers(options: dict[str, Any]) -> None:
    clip, seed, rounds = options["gradient_clip_val"], options["seed"], options["fast_dev_run"]
    if clip is not None and (isinstance(clip, bool) or not isinstance(clip, (int, float)) or not clip >= 0):
        raise _error("gradient_clip_val", "a number of at least 0", clip)
    if seed is not None:
        expect_count("--trainer.seed", seed, least=0)
    if not isinstance(rounds, int) or rounds < 0:
        raise _error("fast_dev_run", "true, false or a number of rounds", rounds)


def _expect_balance(balance: Any, deterministic: Any) -> None:
    _expect_choice("balance", balance, ("samples", "measured"))
    if balance == "measured" and deterministic is True:
        raise FederatedError(
            "Expected `--trainer.balance` to be samples under `--trainer.deterministic true`, got measured: it divides "
            "the clients by the clock, which gives other last bits on another day; change one of the two."
        )


def _expect_places(root: Any, name: Any) -> None:
    if not isinstance(root, (str, os.PathLike)):
        raise _error("default_root_dir", "a folder", root)
    if name is None:
        return
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    if not parts or parts[0] in ("/", "//") or ".." in parts:
        raise _error("name", "a folder name below `--trainer.default_root_dir`", name)


def _expect_parts(sampler: Any, logger: Any) -> None:
    if sampler is not None and not isinstance(sampler, ClientSampler):
        raise _error("sampler", "a ClientSampler, such as UniformSampler", sampler)
    loggers = logger if isinstance(logger, (list, tuple)) else [] if logger in (None, True, False) else [logger]
    for item in loggers:
        if not isinstance(item, Logger):
            raise _error("logger", "true, false, or one or several Lightning loggers", item)


def _expect_duration(duration: Any) -> None:
    """Lets Lightning's Timer judge, which the trainer gives the duration to."""
    wanted = "a duration such as 00:12:00:00 (DD:HH:MM:SS), a timedelta or a dict for one"
    try:
        known = isinstance(duration, (str, timedelta, dict))
        left = Timer(duration=duration).time_remaining() if known else None
    except (MisconfigurationException, TypeError, OverflowError) as error:
        raise _error("max_time", wanted, duration) from error
    if left is None or left < 0:
        raise _error("max_time", wanted, duration)


def _expect_choice(name: str, value: Any, known: tuple[Any, ...]) -> None:
    expect_choice(f"--trainer.{name}", value, known)


def expect_module(module: Any, step: str) -> None:
    """Checks that a module can run here.

    Args:
        module: What the user gave as the model.
        step: The step it must have, such as ``training_step``.

    Raises:
        FederatedError: If it is no LightningModule, lacks the step, or optimizes by itself.
    """
    name = type(module).__name__
    if not isinstance(module, LightningModule):
        foreign = any(base.__module__.startswith("pytorch_lightning.") for base in type(module).__mro__)
        hint = ": derive it from lightning.pytorch's, not from the package pytorch_lightning's" if foreign else ""
        raise FederatedError(f"Expected `--model` to be a LightningModule, got {name}{hint}.")
    # Lightning's own `predict_step` calls `forward`.
    if not is_overridden(step, module) and not (step == "predict_step" and is_overridden("forward", module)):
        raise FederatedError(f"Expected {name} to define `{step}`: add it, or choose another `--model`.")
    if step != "training_step":
        return
    if not module.automatic_optimization:
        raise FederatedError(
            f"Expected {name} to use automatic optimization, but it sets `automatic_optimization = False`: the local "
            "loop steps the optimizer, so return the loss from `training_step`."
        )
    if not is_overridden("configure_optimizers", module):
        raise FederatedError(f"Expected {name} to define `configure_optimizers`, which clients train with.")


def expect_datamodule(datamodule: Any, federated: bool = False) -> LightningDataModule:
    """Checks what the user gave as the data.

    Args:
        datamodule: What the user gave.
        federated: Whether clients are needed, for ``fit``.

    Raises:
        FederatedError: If it is no datamodule, or has no clients where they are needed.
    """
    if not isinstance(datamodule, LightningDataModule):
        raise FederatedError(f"Expected `--data` to be a LightningDataModule, got {type(datamodule).__name__}.")
    if federated and not hasattr(datamodule, "train_source"):
        raise FederatedError(
            f"Expected `--data` to be a FederatedDataModule, which splits a data set over clients, got "
            f"{type(datamodule).__name__}: give its data sets to lightning_fed.data.FederatedDataModule."
        )
    return datamodule
