"""What server and nodes must have in common, what runs on which side, and what a fleet does not carry."""

import json
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback
from torch import Tensor

from lightning_fed.aggregators import Aggregator
from lightning_fed.callbacks import ClientEvaluation, FrozenParameters, Payload
from lightning_fed.callbacks.payload import payloads_of
from lightning_fed.client_algorithms import ClientAlgorithm
from lightning_fed.core.hooks import FederatedCallback, is_stock
from lightning_fed.core.updates import Need
from lightning_fed.core.user_code import describe
from lightning_fed.distributed.consistency import checksum
from lightning_fed.errors import expect, expect_choice

__all__ = ["expect_carried", "expect_same_terms", "methods_sent", "runs_at_nodes", "terms_of"]

# The hooks that are called where a client trains.
_AT_CLIENTS = (
    "on_client_start", "on_local_step_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_client_end", "on_client_entered",
)  # fmt: skip
_OPTIONS = (
    "local_epochs", "local_steps", "local_schedule", "gradient_clip_val", "gradient_clip_algorithm",
    "accumulate_grad_batches", "precision", "clients_per_round",
)  # fmt: skip


def runs_at_nodes(callback: Callback) -> bool:
    """Returns whether a node has a callback too: what clients do, and what decides which weights they train."""
    return isinstance(callback, (ClientAlgorithm, Payload, Aggregator, FrozenParameters))


def methods_sent(callbacks: Sequence[Callback]) -> list[Callback]:
    """Returns those whose ``state_dict`` clients are sent: they read it while they train, or for their weights."""
    bare = {hook: getattr(FederatedCallback, hook) for hook in _AT_CLIENTS}
    bare |= {name: getattr(Aggregator, name) for name in ("client_weight", "update_weight")}
    return [
        each
        for each in callbacks
        if isinstance(each, (ClientAlgorithm, Payload))
        or (
            isinstance(each, Aggregator)
            and any(getattr(type(each), hook, own) is not own for hook, own in bare.items())
        )
    ]


def terms_of(trainer: Any) -> dict[str, Any]:
    """Returns, as JSON, what a node must have as the server has it, by the words for a message."""
    state, options = trainer.train_state, trainer.options
    vector, at_nodes = state.vector, [callback for callback in trainer.callbacks if runs_at_nodes(callback)]
    terms: dict[str, Any] = {
        "seed": trainer.seed,
        "method (`--aggregator`, `--client`, `--trainer.callbacks`)": [describe(callback) for callback in at_nodes],
        **{f"`--trainer.{name}`": describe(getattr(options, name)) for name in _OPTIONS},
        "`--trainer.full_gradients`": vars(options.full_gradients),
        "`--trainer.participation.sampler`": describe(trainer.sampler),
        "`--data.batch_size`": int(state.source.batch_size),
        "`--data.drop_last`": bool(state.source.drop_last),
        "parameters of `--model`": [
            [n, list(p.shape)] for n, p in zip(vector.all_names, vector.all_parameters, strict=True)
        ],
        "memory layout of `--model`": state.layout,
        "parameters that stay with clients": state.personal_names,
        "buffers of `--model`": {name: [list(b.shape), str(b.dtype)] for name, b in state.buffers.values.items()},
        "values of what is frozen in `--model`": checksum(_frozen(state)),
        "optimizer": state.optimizer.state_dict()["built"],
    }
    if any(getattr(callback, "reads_length", False) for callback in at_nodes):
        terms["`--trainer.max_rounds`"] = options.max_rounds
    same: dict[str, Any] = json.loads(json.dumps(terms, default=str))
    return same


def _frozen(state: Any) -> list[Tensor]:
    """Returns the parameters that nobody trains or sends."""
    held = {*state.vector.all_names, *state.buffers.live.places}
    return [p.detach() for name, p in state.module.named_parameters() if name not in held]


def expect_same_terms(own: dict[str, Any], server: dict[str, Any]) -> None:
    """Refuses to take part in a run of another method, model or seed."""
    for name in {**own, **server}:
        here, there = (str(terms.get(name))[:300] for terms in (own, server))
        expect(here == there, f"Expected the server's {name}, {there}, got {here}: start both with one configuration.")


def expect_carried(trainer: Any) -> None:
    """Refuses, before the first round, what a fleet does not carry.

    Raises:
        FederatedError: For several processes, a callback that works on clients while they train, or an edit of what a
            payload has packed.
    """
    expect(
        trainer.world_size == 1,
        f"Expected one process on the server of a fleet, got {trainer.world_size}: set `--trainer.devices 1`.",
    )
    found = [getattr(method, "__self__", method) for hook in _AT_CLIENTS for method in trainer.hooks.methods(hook)]
    for callback in (*found, *(each for each in trainer.callbacks if is_stock(each, "BaseFinetuning"))):
        kind = type(callback)
        ours = kind.__module__.startswith("lightning_fed.") and kind is not ClientEvaluation
        expect(
            ours or runs_at_nodes(callback),
            "Expected callbacks that work between clients, or are client algorithms or payloads, over a fleet, got "
            f"{kind.__name__}, which reads or changes clients while they train at their nodes: leave it out of "
            "`--trainer.callbacks`, or derive it from ClientAlgorithm.",
        )
    apart = [type(each).__name__ for each in trainer.callbacks if not getattr(each, "at_nodes", True)]
    expect(
        not apart,
        f"Expected client algorithms whose server does not look on while clients train, over a fleet, got "
        f"{' and '.join(apart)}: leave it out, or train without a fleet.",
    )
    where = expect_choice("evaluates", getattr(trainer.fleet, "evaluates", "server"), ("server", "nodes", "both"))
    if getattr(trainer.fleet, "sums_only", False):
        expect(where == "server", f"Expected a fleet that shows sums alone to evaluate on the server, got {where}.")
        _expect_sums(trainer)
    payloads = payloads_of(trainer.callbacks)
    for packs, later in zip(payloads, payloads[1:], strict=False):
        first, then = type(packs).__name__, type(later).__name__
        expect(
            not packs.packs,
            f"Expected nothing to change what {first} packs, over a fleet, got {then} after it: put {first} last in "
            "`--trainer.callbacks`.",
        )


def _expect_sums(trainer: Any) -> None:
    """Refuses what reads single clients where the server sees sums alone: ``Need`` says who does."""
    ours = [callback for callback in trainer.callbacks if isinstance(callback, FederatedCallback)]
    for each in ours:
        needs = each.all_needs if isinstance(each, Aggregator) else each.needs
        rounds = range(1, trainer.options.max_rounds + 1)
        looks = type(each).on_client_entered is not FederatedCallback.on_client_entered and not runs_at_nodes(each)
        reads = needs & ~Need.SUMS or looks or any(each.start_gradients(at) == "cohort" for at in rounds)
        expect(
            not reads,
            "Expected methods and diagnostics that read sums over clients, as the fleet shows no more, got "
            f"{getattr(each, 'label', type(each).__name__)}, which reads what single clients send: change it, or use "
            "a fleet that shows single updates.",
        )
