"""Which of Lightning's own callbacks work in a federated run, and the order in which callbacks are called."""

from collections.abc import Iterable, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelSummary, RichModelSummary, Timer

from lightning_fed.aggregators import Aggregator, FedAvg
from lightning_fed.callbacks.checkpoint import FederatedCheckpoint
from lightning_fed.client_algorithms import ClientAlgorithm
from lightning_fed.core.overrides import lightning_class
from lightning_fed.errors import FederatedError

__all__ = ["add_module_callbacks", "order_callbacks"]

_WORKING = (EarlyStopping, Timer, LambdaCallback, ModelSummary, RichModelSummary)
_INSTEAD = {
    "ModelCheckpoint": "use lightning_fed.callbacks.FederatedCheckpoint",
    "TQDMProgressBar": "use `--trainer.enable_progress_bar`",
    "RichProgressBar": "use `--trainer.enable_progress_bar`",
    "GradientAccumulationScheduler": "use `--trainer.accumulate_grad_batches`",
}


def order_callbacks(callbacks: Any, *defaults: Callback | None) -> list[Callback]:
    """Flattens and checks callbacks and puts them in the order in which hooks run.

    Client algorithms come first, then other callbacks, then the one aggregator (FedAvg if there is none), then
    checkpointing.

    Args:
        callbacks: A callback, or a list that may hold None and lists.
        defaults: Callbacks added by the trainer; the user's own FederatedCheckpoint and ModelSummary replace theirs.

    Raises:
        FederatedError: If there are several aggregators or checkpoint callbacks, or one that cannot work here.
    """
    given = list(_flatten(callbacks))
    for callback in given:
        _expect_supported(callback)
    given += [cb for cb in defaults if cb is not None and not _is_replaced(cb, given)]
    algorithms = [cb for cb in given if isinstance(cb, ClientAlgorithm)]
    _expect_one_of_each(algorithms)
    _expect_own_states(given)
    aggregators = [cb for cb in given if isinstance(cb, Aggregator)] or [FedAvg()]
    checkpoints = [cb for cb in given if isinstance(cb, FederatedCheckpoint)]
    others = [cb for cb in given if not isinstance(cb, (ClientAlgorithm, Aggregator, FederatedCheckpoint))]
    for kind, found, option in (
        ("aggregator", aggregators, "`--aggregator` or `--trainer.callbacks`"),
        ("FederatedCheckpoint", checkpoints, "`--trainer.callbacks`"),
    ):
        if len(found) > 1:
            names = " and ".join(type(cb).__name__ for cb in found)
            raise FederatedError(f"Expected one {kind}, got {names}: give only one of them, in {option}.")
    return [*algorithms, *others, *aggregators, *checkpoints]


def _is_replaced(default: Callback, given: list[Callback]) -> bool:
    """Whether the user's own takes the place of a default one."""
    kind = next((kind for kind in (FederatedCheckpoint, ModelSummary) if isinstance(default, kind)), None)
    return kind is not None and any(isinstance(callback, kind) for callback in given)


def add_module_callbacks(callbacks: list[Callback], module: LightningModule) -> list[Callback]:
    """Adds what a module's ``configure_callbacks`` returns; it replaces callbacks of the same class or a parent class.

    Raises:
        FederatedError: If the module brings an aggregator or client algorithm, or a callback that cannot work here.
    """
    own: Any = module.configure_callbacks()
    own = list(own) if isinstance(own, Sequence) else [own]
    for callback in own:
        if isinstance(callback, (Aggregator, ClientAlgorithm)):
            raise FederatedError(
                f"Expected `{type(module).__name__}.configure_callbacks` to leave the federated algorithm to the "
                f"trainer, got {type(callback).__name__}: give it in `--trainer.callbacks`."
            )
    kept = [cb for cb in callbacks if not any(issubclass(type(new), type(cb)) for new in own)]
    return order_callbacks([*kept, *own]) if own else callbacks


def _expect_own_states(callbacks: list[Callback]) -> None:
    """Refuses two callbacks whose states a checkpoint could not tell apart."""
    seen: set[str] = set()
    for callback in callbacks:
        if callback.state_key in seen and type(callback).state_dict is not Callback.state_dict:
            raise FederatedError(
                f"Expected callbacks with states of their own, got two {type(callback).__name__}: leave one out of "
                "`--trainer.callbacks` (`--trainer.max_time` adds a Timer), or give its class another `state_key`."
            )
        seen.add(callback.state_key)


def _expect_one_of_each(algorithms: list[ClientAlgorithm]) -> None:
    """Refuses a client algorithm given twice, and two that move the point where gradients are taken."""
    names = [type(algorithm).__name__ for algorithm in algorithms]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise FederatedError(f"Expected each client algorithm once, got {twice} twice: leave one out of `--client`.")
    moving = [type(algorithm).__name__ for algorithm in algorithms if algorithm.displaces]
    if len(moving) > 1:
        raise FederatedError(
            f"Expected one client algorithm that displaces the point where gradients are taken, got "
            f"{' and '.join(moving)}: leave one out of `--client`."
        )


def _flatten(callbacks: Any) -> Iterable[Callback]:
    if callbacks is None:
        return
    if isinstance(callbacks, (list, tuple)):
        for item in callbacks:
            yield from _flatten(item)
    elif lightning_class(type(callbacks), "Callback") is not None:
        yield callbacks
    else:
        raise FederatedError(
            f"Expected `--trainer.callbacks` to hold Lightning callbacks, got {type(callbacks).__name__}."
        )


def _expect_supported(callback: Callback) -> None:
    """Refuses Lightning's own callbacks, and subclasses of them, that reach into parts that do not exist here."""
    if isinstance(callback, (*_WORKING, FederatedCheckpoint)):
        return
    for kind in type(callback).__mro__:
        stock = kind.__module__.startswith(("lightning.pytorch.callbacks", "pytorch_lightning.callbacks"))
        if stock and kind.__name__ not in ("Callback", "Checkpoint"):
            hint = _INSTEAD.get(kind.__name__, f"these of Lightning's do: {', '.join(c.__name__ for c in _WORKING)}")
            if kind.__module__.startswith("pytorch_lightning.") and kind.__name__ in {c.__name__ for c in _WORKING}:
                hint = f"use {kind.__name__} of lightning.pytorch"
            raise FederatedError(
                f"Expected callbacks that work in a federated run, got {type(callback).__name__}, which needs "
                f"Lightning's own training loop: remove it from `--trainer.callbacks`; {hint}."
            )
