"""The trainer's options, and arguments of Lightning's Trainer that stand for them, checked before any work begins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from difflib import get_close_matches
from importlib import import_module
from inspect import signature
from operator import attrgetter
from types import SimpleNamespace, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch._dynamo import OptimizedModule

from lightning_fed.core.train_state import FullGradients, LocalOptions, Tolerance
from lightning_fed.core.user_code import describe, lightning_class, overrides
from lightning_fed.data.adoption import adopt
from lightning_fed.engines.fleet import Fleet, FleetData
from lightning_fed.errors import FederatedError, expect_choice, expect_count, expect_number, is_count
from lightning_fed.runs.folder import FLAT_NAMES, is_below
from lightning_fed.sampling import Participation

__all__ = [
    "ALIASES", "FOREIGN", "GROUPS", "INSTEAD", "TrainerOptions", "WITHOUT_EFFECT", "batch_limit",
    "expect_datamodule", "expect_module", "known_length", "make_options", "own_arguments", "same_twice",
    "training_data",
]  # fmt: skip

# Options with another name here: a round is an epoch, and some options are in a group.
ALIASES = {"max_epochs": "max_rounds", "check_val_every_n_epoch": "check_val_every_n_rounds", **FLAT_NAMES}

# Any value is accepted, with a message that it changes nothing, for this reason.
WITHOUT_EFFECT = {
    "log_every_n_steps": "a row is logged after every round",
    "num_sanity_val_steps": "round 0 evaluates the whole validation set before any training",
    "inference_mode": "evaluation takes no gradients in any case",
    "use_distributed_sampler": "each client is trained by one process, so no client's data are split",
    "sync_batchnorm": "a client's batch is never split over processes",
    "enable_autolog_hparams": "every logger gets the run's config",
}

# The values that describe what happens here anyway, and what to use instead of any other value.
INSTEAD: dict[str, tuple[tuple[Any, ...], str]] = {
    "min_epochs": ((None,), "a callback may stop a run after any round, so give EarlyStopping a larger `patience`"),
    "max_steps": ((None, -1), "use `max_rounds` for the length of a run and `local_steps` for that of a client"),
    "min_steps": ((None,), "use `local_steps` for the steps of a client in a round"),
    "limit_train_batches": ((None, 1.0), "use `local_steps` for the steps of a client in a round"),
    "overfit_batches": ((None, 0, 0.0), "use `fast_dev_run` for a trial, or give data with few samples"),
    "val_check_interval": (
        (None, 1.0), "the global model changes only between rounds, so use `check_val_every_n_rounds`"
    ),
    "profiler": ((None,), "it times hooks of Lightning's own loops, so put torch.profiler around `fit`"),
    "barebones": (
        (None, False), "use `logger`, `enable_checkpointing`, `enable_progress_bar` and `enable_model_summary`"
    ),
    "plugins": ((None, []), "use `precision` and `strategy`"),
    "reload_dataloaders_every_n_epochs": ((None, 0), "clients keep their data for the whole run, so leave it out"),
    "model_registry": ((None,), "leave it out, and upload the checkpoints of the run's folder yourself"),
}  # fmt: skip

FOREIGN = frozenset({*ALIASES, *WITHOUT_EFFECT, *INSTEAD})
_THEIRS = signature(Trainer).parameters

# Groups of options that Lightning does not have, by topic.
GROUPS: dict[str, type[Any]] = {
    "participation": Participation, "full_gradients": FullGradients, "tolerance": Tolerance
}  # fmt: skip


def own_arguments(given: Mapping[str, Any], others: tuple[str, ...] = ()) -> dict[str, Any]:
    """Turns arguments of Lightning's Trainer into ours, prints which change nothing, suggests ``others`` for a typo."""
    ours, refused = dict[str, Any](), list[str]()
    for name, value in given.items():
        if name in ALIASES:
            if value is not None or name in FLAT_NAMES:  # None in Lightning means its default number
                ours[ALIASES[name]] = value
        elif name in WITHOUT_EFFECT:
            if name not in _THEIRS or not _is_one_of(value, (None, _THEIRS[name].default)):
                rank_zero_info(f"`--trainer.{name}` changes nothing here: {WITHOUT_EFFECT[name]}.")
        elif name in INSTEAD:
            usual, instead = INSTEAD[name]
            if not _is_one_of(value, usual):
                refused.append(f"`--trainer.{name}` not to be set in a federated run, got {value!r}: {instead}")
        else:
            close = get_close_matches(name, [*others, *FOREIGN], n=1)
            meant = f"did you mean `{close[0]}`?" if close else "leave it out."
            raise FederatedError(f"Expected arguments that FederatedTrainer has, got `{name}`: {meant}")
    if refused:
        raise FederatedError(f"Expected {'; '.join(refused)}.")
    return ours


def _is_one_of(value: Any, known: tuple[Any, ...]) -> bool:
    return any(type(value) is type(one) and value == one for one in known)


def make_options(own: Mapping[str, Any], lightning: Mapping[str, Any]) -> TrainerOptions:
    """Returns the options of a constructor, from its ``own`` arguments and those with ``lightning``'s names."""
    default, given = TrainerOptions(), {field.name: own[field.name] for field in fields(TrainerOptions)}
    given |= {name: getattr(default, name) for name in _THEIRS if given.get(name, ...) is None}  # as in Lightning
    for name, kind in GROUPS.items():
        given[name] = kind() if given[name] is None else given[name]
        if not isinstance(given[name], kind):
            raise FederatedError(f"Expected `--trainer.{name}` to be a {kind.__name__}, got {given[name]!r}.")
    parts: dict[str, dict[str, Any]] = {name: {} for name in GROUPS}
    for path, value in own_arguments(lightning, tuple(given)).items():
        former = attrgetter(path)(SimpleNamespace(**given))
        if former != attrgetter(path)(default):
            raise same_twice(path, former, value)
        name, _, part = path.partition(".")
        if part:
            parts[name][part] = value
        else:
            given[name] = value
    return TrainerOptions(**{**given, **{name: replace(given[name], **changes) for name, changes in parts.items()}})


def same_twice(path: str, *values: Any) -> FederatedError:
    """Makes the error for an option that is given under two names in one place."""
    return FederatedError(
        f"Expected `--trainer.{path}` under one name, got {' and '.join(map(str, values))}: leave one out."
    )


@dataclass(frozen=True)
class TrainerOptions(LocalOptions):
    """The arguments of ``FederatedTrainer``, with the same names and defaults; its docstring explains each."""

    accelerator: str = "auto"
    devices: list[int] | str | int = "auto"
    num_nodes: int = 1
    strategy: str = "auto"
    precision: str | int = "32-true"
    memory_format: Literal["auto", "preserve", "channels_last"] = "auto"
    logger: Logger | list[Logger] | bool | None = None
    callbacks: list[Callback] | Callback | None = None
    default_root_dir: str = "runs"
    name: str | None = None
    seed: int | None = None
    max_rounds: int = 100
    clients_per_round: int | float = 1.0
    participation: Participation = Participation()
    client_states: Literal["device", "host", "disk"] = "device"
    check_val_every_n_rounds: int = 1
    check_test_every_n_rounds: int | None = None
    limit_val_batches: int | float = 1.0
    limit_test_batches: int | float = 1.0
    limit_predict_batches: int | float = 1.0
    fast_dev_run: bool | int = False
    enable_progress_bar: bool = True
    enable_checkpointing: bool = True
    max_time: str | timedelta | dict[str, int] | None = None
    enable_model_summary: bool = True
    benchmark: bool | None = None
    detect_anomaly: bool = False

    def __post_init__(self) -> None:
        """Checks every option."""
        options = vars(self)
        for name in ("max_rounds", "check_val_every_n_rounds", "accumulate_grad_batches", "num_nodes"):
            expect_count(f"--trainer.{name}", options[name])
        expect_number("--trainer.local_epochs", self.local_epochs, above=0, most=1e9, optional=True)
        for name in ("seed", "local_steps", "check_test_every_n_rounds", "chunk_size"):
            if options[name] is not None:
                expect_count(f"--trainer.{name}", options[name], least=0 if name == "seed" else 1)
        for name in ("limit_val_batches", "limit_test_batches", "limit_predict_batches"):
            _expect_share(name, options[name], smallest=0)
        _expect_share("clients_per_round", self.clients_per_round, smallest=1)
        for name, hint in get_type_hints(type(self)).items():
            if (known := _choices(hint)) is not None:
                expect_choice(f"--trainer.{name}", options[name], known)
        if self.local_epochs is not None and self.local_steps is not None:
            raise FederatedError(
                "Expected either `--trainer.local_epochs` or `--trainer.local_steps`, got both: leave one out."
            )
        clip = self.gradient_clip_val
        if clip is not None and (isinstance(clip, bool) or not isinstance(clip, (int, float)) or not clip >= 0):
            raise _error("gradient_clip_val", "a number of at least 0", clip)
        if not isinstance(self.fast_dev_run, int) or self.fast_dev_run < 0:
            raise _error("fast_dev_run", "true, false or a number of rounds", self.fast_dev_run)
        if not isinstance(self.default_root_dir, (str, os.PathLike)):
            raise _error("default_root_dir", "a folder", self.default_root_dir)
        if self.name is not None and not is_below(self.name):
            raise _error("name", "a folder name below `--trainer.default_root_dir`", self.name)
        _expect_loggers(self.logger)
        _expect_duration(self.max_time)

    def describe(self) -> dict[str, Any]:
        """Returns the options as primitives, by name."""
        return {name: describe(vars(value) if name in GROUPS else value) for name, value in vars(self).items()}

    def shortened(self) -> TrainerOptions:
        """Returns the options; with ``fast_dev_run`` n, cut to n rounds of n steps, and n batches per evaluation."""
        count = int(self.fast_dev_run)
        if not count:
            return self
        steps = min(count, self.local_steps or count)
        return replace(
            self, max_rounds=count, local_steps=steps, local_epochs=None, logger=False, enable_checkpointing=False,
            participation=Participation(self.participation.sampler),
            limit_val_batches=count, limit_test_batches=count, limit_predict_batches=count,
        )  # fmt: skip


def _choices(hint: Any) -> tuple[Any, ...] | None:
    """Returns the values that a type hint allows if it has only bool, None and Literal; else None."""
    if hint is bool:
        return True, False
    if hint is type(None):
        return (None,)
    if get_origin(hint) is Literal:
        return get_args(hint)
    parts = [_choices(part) for part in get_args(hint)] if get_origin(hint) in (Union, UnionType) else [None]
    return None if None in parts else tuple(value for part in parts for value in part or ())


def known_length(loader: Any) -> int | None:
    """Returns the number of batches; None if unknown, as for streams (their loaders have a ``__len__`` that raises)."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # raised by the `__len__` of a stream
        return None


def batch_limit(limit: int | float, total: int | None) -> int | None:
    """Turns a limit, a count (int) or fraction (float) of ``total`` (None: unknown), into batches (None: all)."""
    if not isinstance(limit, float):
        return limit
    if limit == 1.0:
        return None
    if total is None or (limit > 0 and int(limit * total) == 0):
        got = "a loader without a length" if total is None else f"only {total} batches"
        raise FederatedError(
            f"Expected a fraction given as `--trainer.limit_val_batches`, `limit_test_batches` or "
            f"`limit_predict_batches` to be at least one batch, got {limit} of {got}: give a count instead."
        )
    return int(limit * total)


def _error(name: str, expected: str, value: Any) -> FederatedError:
    return FederatedError(f"Expected `--trainer.{name}` to be {expected}, got {value!r}.")


def _expect_share(name: str, value: Any, smallest: int) -> None:
    is_share = isinstance(value, float) and 0 <= value <= 1 and (smallest == 0 or value > 0)
    if not (is_count(value, smallest) or is_share):
        lower = "[0" if smallest == 0 else "(0"
        raise _error(name, f"a count (an integer of at least {smallest}) or a fraction in {lower}, 1]", value)


def _expect_loggers(logger: Any) -> None:
    loggers = logger if isinstance(logger, (list, tuple)) else [] if logger in (None, True, False) else [logger]
    for item in loggers:
        if not isinstance(item, Logger):
            raise _error("logger", "true, false, or one or several Lightning loggers", item)


def _expect_duration(duration: Any) -> None:
    """Checks the duration with Lightning's Timer, because the trainer gives it to a Timer."""
    if duration is None:
        return
    wanted = "a duration such as 00:12:00:00 (DD:HH:MM:SS), a timedelta or a dict for one"
    try:
        known = isinstance(duration, (str, timedelta, dict))
        left = Timer(duration=duration).time_remaining() if known else None
    except (MisconfigurationException, TypeError, OverflowError) as error:
        raise _error("max_time", wanted, duration) from error
    if left is None or left < 0:
        raise _error("max_time", wanted, duration)


def expect_module(module: Any, step: str) -> LightningModule:
    """Refuses a model that is no LightningModule, or that Lightning would not run ``step`` of.

    Returns:
        The module; for one wrapped by ``torch.compile``, the inner module with compiled steps, as in Lightning.
    """
    inner: Any = module._orig_mod if isinstance(module, OptimizedModule) else module
    name = type(inner).__name__
    base = lightning_class(type(inner), "LightningModule")
    if base is None:
        raise FederatedError(f"Expected `--model` to be a LightningModule, got {name}.")
    package = base.__module__.partition(".core.")[0]
    validator = import_module(f"{package}.trainer.configuration_validator")
    try:
        validator._verify_loop_configurations(_as_lightning_checks(inner, step))
    except (RuntimeError, MisconfigurationException) as error:
        raise FederatedError(f"Expected a `--model` that Lightning accepts, got {name}: {error}") from error
    if inner is not module and inner._compiler_ctx is None:
        import_module(f"{package}.utilities.compile").from_compiled(module)
    return cast(LightningModule, inner)


def _as_lightning_checks(module: LightningModule, step: str) -> Any:
    """Returns what Lightning's checks of a module read of a trainer; other parts are checked here elsewhere."""
    stages = {"training_step": "fit", "validation_step": "validate", "test_step": "test", "predict_step": "predict"}
    has_validation = SimpleNamespace(is_defined=lambda: overrides(module, "validation_step"))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(val_loop=SimpleNamespace(_data_source=has_validation)))
    state, plain = (
        SimpleNamespace(fn=TrainerFn(stages[step])),
        {"gradient_clip_val": None, "accumulate_grad_batches": 1},
    )
    return SimpleNamespace(lightning_module=module, state=state, fit_loop=loop, **plain)


def training_data(fleet: Fleet | None, model: Any, datamodule: Any, train: Any, val: Any) -> LightningDataModule:
    """Returns the data of ``fit``; where a fleet has the clients, those are for evaluation alone."""
    if fleet is None:
        return expect_datamodule(model, datamodule, train=train, val=val)
    return FleetData(fleet, adopt(datamodule or train, model, val=val))


def expect_datamodule(model: Any, datamodule: Any, **loaders: Any) -> LightningDataModule:
    """Returns the data of a call as a data module, for ``train`` with clients; refuses data that do not fit the call.

    ``loaders`` are data loaders for ``train``, ``val``, ``test`` or ``predict``; the first is the call's own stage.
    """
    data = adopt(datamodule, model, **loaders)
    if data is None:
        raise FederatedError(
            f"Expected data for {type(model).__name__}, got none: give a data module (`--data`), data loaders, or a "
            f"model with a `{next(iter(loaders))}_dataloader` of its own."
        )
    if not isinstance(data, LightningDataModule):
        raise FederatedError(
            f"Expected `--data` to be a LightningDataModule or data loaders, got {type(data).__name__}."
        )
    if "train" in loaders and not hasattr(data, "train_source"):
        raise FederatedError(
            f"Expected `--data` to be a FederatedDataModule, which splits a data set over clients, or a data module "
            f"with a `train_dataloader`, got {type(data).__name__}: add one, or give its data sets to "
            "lightning_fed.data.FederatedDataModule."
        )
    return data
