"""What those arguments of Lightning's Trainer mean here that ours does not have under their names."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from inspect import signature
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from lightning_fed.errors import FederatedError

__all__ = ["ALIASES", "FOREIGN", "INSTEAD", "WITHOUT_EFFECT", "own_arguments", "with_aliases"]

# The same under another name: a round is an epoch here.
ALIASES = {"max_epochs": "max_rounds", "check_val_every_n_epoch": "check_val_every_n_rounds"}

# Any value is taken, and said to change nothing: why.
WITHOUT_EFFECT = {
    "log_every_n_steps": "a row is logged after every round",
    "num_sanity_val_steps": "round 0 evaluates the whole validation set before any training",
    "inference_mode": "evaluation takes no gradients in any case",
    "use_distributed_sampler": "processes share out whole clients, so that no client's data are split",
    "sync_batchnorm": "a client's batch is never split over processes",
    "enable_autolog_hparams": "every logger gets the run's config",
}

# Values under which a run goes as it does here anyway, and for any other what to use instead.
INSTEAD: dict[str, tuple[tuple[Any, ...], str]] = {
    "min_epochs": ((None,), "a callback may stop a run after any round, so give EarlyStopping a larger `patience`"),
    "max_steps": ((None, -1), "use `max_rounds` for the length of a run and `local_steps` for that of a client"),
    "min_steps": ((None,), "use `local_steps` for the steps of a client in a round"),
    "limit_train_batches": ((None, 1.0), "use `local_steps` for the steps of a client in a round"),
    "overfit_batches": ((None, 0, 0.0), "use `fast_dev_run` for a trial, or give data with few samples"),
    "val_check_interval": (
        (None, 1.0), "the global model changes between rounds alone, so use `check_val_every_n_rounds`"
    ),
    "profiler": ((None,), "the hooks that it times are Lightning's loops', so put torch.profiler around `fit`"),
    "barebones": (
        (None, False), "use `logger`, `enable_checkpointing`, `enable_progress_bar` and `enable_model_summary`"
    ),
    "plugins": ((None, []), "use `precision` and `strategy`"),
    "reload_dataloaders_every_n_epochs": ((None, 0), "clients keep their data for the whole run, so leave it out"),
    "model_registry": ((None,), "upload the checkpoints of the run's folder, so leave it out"),
}  # fmt: skip

FOREIGN = frozenset({*ALIASES, *WITHOUT_EFFECT, *INSTEAD})


def own_arguments(given: Mapping[str, Any], others: tuple[str, ...] = ()) -> dict[str, Any]:
    """Turns arguments of Lightning's Trainer into ours, and says which of them change nothing.

    Where nobody knows a name, one of ``others`` is proposed, which ours has.
    """
    ours: dict[str, Any] = {}
    for name, value in given.items():
        if name in ALIASES:
            if value is not None:  # as Lightning's defaults for "the usual number"
                ours[ALIASES[name]] = value
        elif name in WITHOUT_EFFECT:
            rank_zero_info(f"`--trainer.{name}` changes nothing here: {WITHOUT_EFFECT[name]}.")
        elif name in INSTEAD:
            usual, instead = INSTEAD[name]
            if not any(type(value) is type(known) and value == known for known in usual):
                raise FederatedError(
                    f"Expected no `--trainer.{name}` of Lightning's in a federated run, got {value!r}: {instead}."
                )
        else:
            close = get_close_matches(name, [*others, *FOREIGN], n=1)
            meant = f"did you mean `{close[0]}`?" if close else "leave it out."
            raise FederatedError(f"Expected arguments that FederatedTrainer has, got `{name}`: {meant}")
    return ours


def with_aliases(lightning: Mapping[str, Any], of: Callable[..., Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ours of the arguments that the constructor ``of`` was given under other names, beside its ``own``."""
    parameters = signature(of).parameters
    renamed = own_arguments(lightning, tuple(name for name in parameters if name not in ("self", "lightning")))
    for name, value in renamed.items():
        if own[name] != parameters[name].default:
            raise FederatedError(
                f"Expected `--trainer.{name}` under one name, got {own[name]} and {value}: leave one out."
            )
    return renamed
