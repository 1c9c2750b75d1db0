"""Handles arguments of Lightning's Trainer that FederatedTrainer does not have under the same name."""

from collections.abc import Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from inspect import signature
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_fed.errors import FederatedError
from lightning_fed.runs.folder import FLAT_NAMES
from lightning_fed.trainer.options import GROUPS, TrainerOptions

__all__ = ["ALIASES", "FOREIGN", "INSTEAD", "WITHOUT_EFFECT", "make_options", "own_arguments", "same_twice"]

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
