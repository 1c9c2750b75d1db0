"""Which of Lightning's own callbacks work in a federated run, and the order in which callbacks are called."""

from collections.abc import Iterable, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities import rank_zero_info

from lightning_fed.aggregators import Aggregator, FedAvg
from lightning_fed.callbacks.checkpoint import FederatedCheckpoint
from lightning_fed.callbacks.lightning_callbacks import StockCallbacks
from lightning_fed.callbacks.payload import Payload, payloads_of
from lightning_fed.callbacks.progress import FederatedProgressBar
from lightning_fed.client_algorithms import ClientAlgorithm
from lightning_fed.core.hooks import ONCE_A_ROUND, FederatedCallback, is_stock
from lightning_fed.core.updates import Need
from lightning_fed.core.user_code import lightning_class
from lightning_fed.errors import FederatedError, expect

__all__ = ["BARS", "INSTEAD", "WORKING", "add_module_callbacks", "expect_covered", "order_callbacks"]

# Lightning's own callbacks that work unchanged, some of them called once a round: `callbacks.lightning_callbacks`.
WORKING = (
    "EarlyStopping", "Timer", "LambdaCallback", "ModelSummary", "RichModelSummary", "ModelCheckpoint",
    "OnExceptionCheckpoint", "LearningRateMonitor", "DeviceStatsMonitor", "WeightAveraging", "BasePredictionWriter",
    "BackboneFinetuning", "BaseFinetuning",
)  # fmt: skip
# Lightning's bars show batches of one loader; the trainer's own bar shows rounds and clients instead.
BARS = ("TQDMProgressBar", "RichProgressBar")
# The trainer's own callbacks that the user's replace.
_REPLACEABLE = (FederatedCheckpoint, FederatedProgressBar, ModelSummary)
# What one client algorithm of a run alone can do.
_ONE_OF = {
    "displaces": "displaces the point where gradients are taken",
    "replaces_gradient": "replaces the gradient, as the second would take the first one's for that of the loss",
    "scales_gradient": "scales the gradient, as the second would scale the first one's term too",
    "has_own_model": "gives each client a model of its own",
}
_WHOLE = "start a run of the whole model from its checkpoint by `--weights`"
# Lightning's other callbacks, and what to do instead.
INSTEAD = {
    "BatchSizeFinder": "give `--data.batch_size`",
    "LearningRateFinder": "give the learning rate to the model's optimizer or to `--optimizer`",
    "GradientAccumulationScheduler": "use `--trainer.accumulate_grad_batches`",
    "ModelPruning": f"prune the model before `fit`, or prune the trained model and {_WHOLE}",
    "StochasticWeightAveraging": "use Lightning's WeightAveraging for the average of the global models",
    "SpikeDetection": "use `--trainer.tolerance.max_diverged`",
    "ThroughputMonitor": "read the columns `time/round`, `samples` and `gradients` of metrics.csv",
    "ProgressBar": "use `--trainer.enable_progress_bar`",
}


def order_callbacks(callbacks: Any, *defaults: Callback | None) -> list[Callback]:
    """Flattens and checks callbacks, and sorts them in the order in which hooks run.

    Client algorithms come first, then other callbacks, then the one aggregator (FedAvg if there is none), then
    checkpointing.

    Args:
        callbacks: A callback, or a list that may hold None and lists.
        defaults: Callbacks added by the trainer; those in ``_REPLACEABLE`` give way to the user's own.
    """
    given = [callback for callback in _flatten(callbacks) if not _is_bar(callback)]
    for callback in given:
        _expect_supported(callback)
    if any(is_stock(cb, kind) for cb in given for kind in ONCE_A_ROUND):
        given += [] if any(isinstance(cb, StockCallbacks) for cb in given) else [StockCallbacks()]
    replaced = tuple(kind for kind in _REPLACEABLE if any(isinstance(cb, kind) for cb in given))
    given += [cb for cb in defaults if cb is not None and not isinstance(cb, replaced)]
    algorithms = [cb for cb in given if isinstance(cb, ClientAlgorithm)]
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
    _expect_each_once([*algorithms, *others])
    _expect_one_of_each(algorithms)
    _expect_mean_under_noise(others, aggregators[0])
    _expect_served_needs([*algorithms, *others], aggregators[0])
    return [*algorithms, *others, *aggregators, *checkpoints]


def add_module_callbacks(callbacks: list[Callback], module: LightningModule) -> list[Callback]:
    """Adds what ``configure_callbacks`` returns; each replaces callbacks of the same class or a parent class."""
    own: Any = module.configure_callbacks()
    own = list(own) if isinstance(own, Sequence) else [own]
    for callback in own:
        if isinstance(callback, (Aggregator, ClientAlgorithm)):
            raise FederatedError(
                f"Expected `{type(module).__name__}.configure_callbacks` to return no aggregator or client "
                f"algorithm, got {type(callback).__name__}: give it in `--trainer.callbacks`."
            )
    kept = [cb for cb in callbacks if not any(issubclass(type(new), type(cb)) for new in own)]
    return order_callbacks([*kept, *own]) if own else callbacks


def _expect_each_once(callbacks: list[Callback]) -> None:
    """Refuses two callbacks that log under the same names, or whose states a checkpoint could not tell apart."""
    seen: set[str] = set()
    for callback in callbacks:
        kind, key = type(callback), callback.state_key
        ours = isinstance(callback, (ClientAlgorithm, Payload)) or kind.__module__.startswith("lightning_fed.")
        if key in seen and (ours or kind.state_dict is not Callback.state_dict):
            raise FederatedError(
                f"Expected each callback once, got {kind.__name__} twice: leave one out of `--client` or "
                "`--trainer.callbacks` (`--trainer.max_time` adds a Timer), or give its class another `state_key`."
            )
        seen.add(key)


def _expect_one_of_each(algorithms: list[ClientAlgorithm]) -> None:
    """Refuses two client algorithms of those of which there can be one."""
    for kind, what in _ONE_OF.items():
        found = [type(algorithm).__name__ for algorithm in algorithms if getattr(algorithm, kind)]
        if len(found) > 1:
            raise FederatedError(
                f"Expected one client algorithm that {what}, got {' and '.join(found)}: leave one out of `--client`."
            )


def _expect_served_needs(callbacks: list[Callback], aggregator: Aggregator) -> None:
    """Refuses a callback that reads gradients or losses of the reduced update which nobody computes."""
    served = aggregator.all_needs | (Need.ANY_LOSS if aggregator.all_needs & Need.ANY_LOSS else Need.NOTHING)
    for callback in callbacks:
        needs = callback.needs if isinstance(callback, FederatedCallback) else Need.NOTHING
        if missing := needs & (Need.ANY_GRADIENT | Need.ANY_LOSS) & ~served:
            name, rule = type(callback).__name__, type(aggregator).__name__
            raise FederatedError(
                f"Expected `needs` of {name} to hold no gradients and no losses but those that {rule} asks for too, "
                f"got {missing}: ask for them by its `start_gradients`, or change `--aggregator`."
            )


def _expect_mean_under_noise(callbacks: list[Callback], aggregator: Aggregator) -> None:
    """Refuses a rule, a mask or a callback that reads more than the mean of noisy updates."""
    noisy = [type(payload).__name__ for payload in payloads_of(callbacks) if payload.adds_noise]
    if noisy and aggregator.all_needs & ~Need.MEAN:
        raise FederatedError(
            f"Expected {noisy[0]} with a rule that reads only the mean update, got {aggregator.label}, which "
            "reads votes or single updates that noise would spoil or not reach: leave out `--aggregator.mask` or "
            "use NoiseFloorMask, or change `--aggregator`."
        )
    for callback in callbacks if noisy else ():
        entered = getattr(type(callback), "on_client_entered", FederatedCallback.on_client_entered)
        reads = getattr(callback, "needs", Need.NOTHING) & ~Need.MEAN or entered != FederatedCallback.on_client_entered
        expect(
            isinstance(callback, Payload) or not reads,
            f"Expected {noisy[0]} with callbacks that read only the mean update, got {type(callback).__name__}, which "
            "reads what single clients send or train: leave it out of `--trainer.callbacks`.",
        )


def expect_covered(trainer: Any) -> None:
    """Refuses, before the first round, what would leave clients without noise, and samplers other than assumed."""
    parts, sampler = trainer.options.participation, type(trainer.sampler).__name__
    wanted, kinds = trainer.sampler.made_for, [kind for part in trainer.callbacks for kind in type(part).__mro__]
    expect(
        wanted is None or wanted in {kind.__name__ for kind in kinds},
        f"Expected `--client {wanted}` with {sampler}, as else every client starts from the newest model, got none.",
    )
    for payload in payloads_of(trainer.callbacks):
        name, assumed = type(payload).__name__, payload.assumes_sampler
        for wrong, wanted, why in _without_noise(trainer) if payload.adds_noise else ():
            expect(not wrong, f"Expected {wanted} beside {name}, as {why}.")
        expect(
            assumed is None or (isinstance(trainer.sampler, assumed) and parts.availability is None),
            f"Expected `--trainer.participation.sampler {getattr(assumed, '__name__', '')}`, which {name} assumes, and "
            f"no `--trainer.participation.availability`, got {sampler} and {parts.availability!r}.",
        )


def _without_noise(trainer: Any) -> list[tuple[Any, str, str]]:
    """Returns what noise does not cover: whether it is there, what to do instead, and why."""
    options, rounds = trainer.options, range(1, trainer.options.max_rounds + 1)
    ours = [callback for callback in trainer.callbacks if isinstance(callback, FederatedCallback)]
    exchanging = [type(cb).__name__ for cb in ours if any(cb.start_gradients(at) == "cohort" for at in rounds)]
    averages = trainer.buffers.policy == "average" and trainer.buffers.num_bytes
    return [
        (trainer.by_samples, "`--aggregator.weighting uniform`", "weights by samples make some updates count for more"),
        (averages, "`--aggregator.buffers local` or keep", "averages of buffers get no noise"),
        (exchanging, f"no {' and no '.join(exchanging)}", "the gradients that are exchanged for it get no noise"),
        (options.participation.stragglers, "no `--trainer.participation.stragglers`", "who is late is a client's own"),
        (options.tolerance.max_diverged, "`--trainer.tolerance.max_diverged 0`", "who diverges is a client's own"),
    ]


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


def _is_bar(callback: Callback) -> bool:
    """Returns whether a callback is a bar of Lightning's, and prints what is shown instead."""
    name = type(callback).__name__
    if name not in BARS or not is_stock(callback, name):
        return False
    rank_zero_info(
        f"{name} shows one loader's batches: rounds and clients are shown by `--trainer.enable_progress_bar`."
    )
    return True


def _expect_supported(callback: Any) -> None:
    """Refuses callbacks of Lightning's, and their subclasses, that need parts of its trainer that do not exist here."""
    if any(is_stock(callback, name) for name in WORKING):
        if is_stock(callback, "ModelCheckpoint") and (callback._every_n_train_steps or callback._train_time_interval):
            raise FederatedError(  # within a round there is no global model
                "Expected a ModelCheckpoint to save after rounds, got `every_n_train_steps` or "
                "`train_time_interval`: use `every_n_epochs`, in rounds."
            )
        return
    for kind in type(callback).__mro__:
        stock = kind.__module__.startswith(("lightning.pytorch.callbacks", "pytorch_lightning.callbacks"))
        if stock and kind.__name__ not in ("Callback", "Checkpoint"):
            known = [INSTEAD[base.__name__] for base in kind.__mro__ if base.__name__ in INSTEAD]
            hint = known[0] if known else f"of Lightning's own these work: {', '.join(WORKING)}"
            if kind.__module__.startswith("pytorch_lightning.") and kind.__name__ in WORKING:
                hint = f"use {kind.__name__} of lightning.pytorch"
            raise FederatedError(
                f"Expected callbacks that work in a federated run, got {type(callback).__name__}, which needs "
                f"Lightning's own training loop: remove it from `--trainer.callbacks`; {hint}."
            )
