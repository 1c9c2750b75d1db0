"""The round loop: draws a cohort, trains it, steps the global model, evaluates, logs and saves."""

import math
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_warn

from lightning_fed.aggregators import Aggregator
from lightning_fed.callbacks import FederatedCheckpoint
from lightning_fed.callbacks.lightning_callbacks import StockCallbacks
from lightning_fed.callbacks.payload import payloads_of
from lightning_fed.client_algorithms import ClientAlgorithm
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.recorder import LoggedMetrics, recording
from lightning_fed.core.seeding import Purpose, seed_everywhere, seed_for
from lightning_fed.core.updates import Cohort, Need, ReducedUpdate
from lightning_fed.core.user_code import is_ours, overrides
from lightning_fed.distributed.consistency import (
    Standing,
    checksum,
    expect_same_standing,
    follow_first,
    plain_options,
    state_of_first,
)
from lightning_fed.distributed.sharing import make_reducer
from lightning_fed.engines import make_engine
from lightning_fed.engines.client_batches import local_steps
from lightning_fed.engines.watch import HookGuard
from lightning_fed.errors import FederatedError
from lightning_fed.runs.log import RunLog
from lightning_fed.sampling import CohortDraw
from lightning_fed.trainer.bookkeeping import StopRequest, going_on, round_costs
from lightning_fed.trainer.evaluation import evaluate
from lightning_fed.trainer.lightning_names import LightningNames

__all__ = ["RoundLoop"]

# Hooks between clients: the module's weights then are not those from which the next client starts.
_ROUND_HOOKS = (
    "on_train_epoch_start", "on_round_start", "on_before_server_step", "on_round_end", "on_after_server_step",
    "on_train_epoch_end", "on_save_checkpoint",
)  # fmt: skip
_OF_MODULES_TOO = ("on_train_epoch_start", "on_train_epoch_end", "on_save_checkpoint")
_BEFORE_STEP = ("on_before_server_step", "on_round_end")


class RoundLoop:
    """Runs the rounds of one ``fit``; model, data, global vector and callbacks are set up and restored before."""

    def __init__(self, trainer: LightningNames, log: RunLog, stop: StopRequest) -> None:
        self.trainer, self.options, self.state = trainer, trainer.options, trainer.train_state
        self.module, self.log, self.stop = trainer.lightning_module, log, stop
        few = max(2, trainer.aggregator.min_clients)
        self.cohort_size = min(trainer.cohort_size, few) if self.options.fast_dev_run else trainer.cohort_size
        self.noisy = any(payload.adds_noise for payload in payloads_of(trainer.callbacks))
        self.cohorts = self._make_draw()
        self.cohorts.expect_anybody(self.options.max_rounds)
        self.agreed: int | None = None  # the signal after which all processes stop
        self.row: dict[str, float] = {}
        self.warned_of_nan = False
        self.recorder = self.state.recorder
        needs, averages = trainer.aggregator.all_needs, trainer.aggregator.buffers == "average"
        for callback in trainer.callbacks:
            needs |= callback.needs if isinstance(callback, FederatedCallback) else Need.NOTHING
        num_clients = int(np.count_nonzero(np.asarray(self.state.source.sizes)))
        averaged = self.state.buffers.of_client if averages else dict
        self.reducer = make_reducer(trainer.processes, averaged, self.state.weights, needs, num_clients)
        checkpoints = [cb for cb in trainer.callbacks if isinstance(cb, FederatedCheckpoint)]
        self.checkpoint = checkpoints[0] if checkpoints and not self.options.fast_dev_run else None
        self.guard = HookGuard(self.state, trainer.processes)
        self.watched = {hook for hook in _ROUND_HOOKS if self._is_users(hook)}
        self.stock = next((cb for cb in trainer.callbacks if isinstance(cb, StockCallbacks)), None)

    def run(self) -> None:
        """Evaluates round 0 if the run is new, then trains until the last round, a stop or a signal."""
        trainer = self.trainer
        self._seed(at=0)
        trainer.hooks("on_fit_start")
        with recording(self.module, self.recorder):
            trainer.hooks("on_train_start")
        self.guard.take_over_start(trainer.resumed)
        self._note(LoggedMetrics({}, dict(trainer.totals), {}))  # for monitors; row 0 has no counts
        self._note(self.recorder.compute())
        # Only now, because hooks before may still change the module.
        self.engine = make_engine(self.state, self.options, trainer.hooks, self.reducer, trainer.fleet)
        trainer.books.log_start(trainer, self.log)
        if trainer.round == 0 and not trainer.resumed:
            started = time.perf_counter()
            self._evaluate()
            self._finish_round(started)
        while self._continues():
            self._run_round()
            self.log.catch_up()
        self._save(final=True)
        trainer.hooks("on_train_end")
        trainer.hooks("on_fit_end")

    def _continues(self) -> bool:
        trainer = self.trainer
        signum = self.stop.signum if trainer.world_size == 1 else self.agreed
        return self.state.round < self.options.max_rounds and not trainer.should_stop and signum is None

    def _run_round(self) -> None:
        trainer, started = self.trainer, time.perf_counter()
        self.state.round += 1
        trainer.state.stage = RunningStage.TRAINING
        self._seed(at=1)
        self.engine.trainer.begin_round()
        cohort = self.cohorts.draw(trainer.round, self.cohort_size)
        self._note(LoggedMetrics(self.cohorts.facts, self.cohorts.facts, {}))
        with recording(self.module, self.recorder):
            self._call("on_train_epoch_start")
            self._call("on_round_start", cohort, module=False)
            rates = self._learning_rates()
            self._note(LoggedMetrics(rates, rates, {}))
            if self.noisy:
                self._note(self.recorder.compute())
            update = self.engine.train(cohort)
            if self.noisy:  # what clients log goes out without noise: it is left out of the row
                self.recorder.series = {}
                self.recorder.reset_metrics()
            self.state.steps_before_round += self.engine.counts.max_steps
            trained = time.perf_counter() - started
            self._seed(at=2)
            if update.num_clients or self.noisy:
                self._step_server(update)
            elif cohort.clients and not self.engine.divergence.clients and self.options.participation.work is None:
                self._expect_training()
            self.state.load_global_model()  # again, because hooks after the server's step may have changed the weights
            self._count(cohort, update, trained)
            self._note(self.recorder.compute())
            self._evaluate()
            trainer.state.stage = RunningStage.TRAINING
            self._call("on_train_epoch_end", monitors=False)
            self._note(self.recorder.compute())
            self.recorder.reset_metrics()
            if update.num_clients:  # else a monitored metric of clients is from an earlier round or missing
                self._call("on_train_epoch_end", module=False, monitors=True)
        self._finish_round(started)

    def _expect_training(self) -> None:
        """Warns if no client has taken a step in the run so far, and refuses a run in which none ever has."""
        if self.state.steps_before_round:
            return
        name = type(self.module).__name__
        why = "its `training_step` has returned no loss, or every learning rate has been 0"
        if not self.module.automatic_optimization:
            why = "as `automatic_optimization` is False, `training_step` calls the `step()` of one of `optimizers()`"
        if self.trainer.round == self.options.max_rounds and any(self._learning_rates().values()):
            raise FederatedError(f"Expected {name} to train, but no client has taken a step in any round: {why}.")
        rank_zero_warn(f"No client of {name} has taken a step yet: {why}.")

    def _is_users(self, hook: str) -> bool:
        """Returns whether a hook between clients runs user code."""
        own = not all(is_ours(method) for method in self.trainer.hooks.methods(hook))
        return own or (hook in _OF_MODULES_TOO and overrides(self.module, hook))

    def _call(self, hook: str, *args: Any, **options: Any) -> None:
        """Calls a hook between clients, and handles changes that user code makes to the module there."""
        with self.guard.watching(f"`{hook}`", hook in self.watched, before_step=hook in _BEFORE_STEP):
            self.trainer.hooks(hook, *args, **options)

    def _seed(self, at: int) -> None:
        """Seeds the global streams for hooks outside local training, so that a resumed run draws the same numbers."""
        seed_everywhere(seed_for(self.trainer.seed, Purpose.ROUND, self.trainer.round, at))

    def _make_draw(self) -> CohortDraw:
        trainer, options, source = self.trainer, self.options, self.state.source
        sizes, parts = np.asarray(source.sizes), options.participation
        return CohortDraw(
            trainer.seed, sizes, local_steps(source, options, sizes),
            local_steps(source, replace(options, local_epochs=1, local_steps=None), sizes),
            0 if self.noisy else max(trainer.aggregator.min_clients, 1),
            trainer.sampler, parts.availability, parts.stragglers, parts.work,
        )  # fmt: skip

    @torch.no_grad()
    def _step_server(self, update: ReducedUpdate) -> None:
        trainer = self.trainer
        for payload in reversed(payloads_of(trainer.callbacks)):
            payload.watched(payload.decode, trainer, self.module, update)
        self._call("on_before_server_step", update, module=False)
        if self.noisy:  # whoever took part, or one would see that nobody did
            self._step_weights(update)
        elif not update.weights.any():
            why = f"its {update.num_clients} clients have weight 0 in {type(trainer.aggregator).__name__}"
            rank_zero_warn(f"Round {trainer.round} leaves the model as it is: {why}.")
        elif self.cohorts.suffices(trainer.round, update.num_clients):
            self._step_weights(update)
        self._call("on_after_server_step", update, module=False)

    def _step_weights(self, update: ReducedUpdate) -> None:
        trainer = self.trainer
        self._call("on_round_end", update, module=False)
        aggregator = trainer.aggregator
        with self.guard.watching(
            f"`{type(aggregator).__name__}.server_step`", not is_ours(type(aggregator)), before_step=True
        ):
            aggregator.step(trainer, self.module, update)
        buffers = self.state.buffers
        buffers.step(update)
        stepped = [self.state.weights, *(buffers.values[name] for name in update.buffers)]
        follow_first(trainer.processes, stepped, "server step")
        if not math.isfinite(trainer.weights.norm().item()):
            raise FederatedError(
                f"Expected a finite global model after the server step of round {trainer.round}, got NaN or infinity: "
                "lower `--aggregator.lr` or the learning rate in the model's optimizer."
            )
        self.state.load_global_model()
        buffers.recompute()

    def _learning_rates(self) -> dict[str, float]:
        """Returns the clients' first learning rate in the round, by column: ``lr``, or ``lr/K`` for the K-th group."""
        groups = [group for optimizer in self.trainer.optimizers for group in optimizer.param_groups if "lr" in group]
        names = ["lr"] if len(groups) == 1 else [f"lr/{number}" for number in range(1, len(groups) + 1)]
        return {name: float(group["lr"]) for name, group in zip(names, groups, strict=True)}

    def _count(self, cohort: Cohort, update: ReducedUpdate, trained: float) -> None:
        """Adds to the run's totals, and logs how many clients took part."""
        totals = self.trainer.totals
        for name, count in round_costs(self.trainer, self.engine, update).items():
            totals[name] += count
        if self.cohorts.seconds is not None:
            totals["simulated/time"] = totals.get("simulated/time", 0.0) + self.cohorts.seconds
        entered, left_out = float(update.num_clients), self.engine.divergence
        drawn = len(cohort.clients) + len(cohort.skipped)
        counts = {
            "clients/trained": entered,
            "clients/skipped": drawn - entered,
            "clients/diverged": float(len(left_out.clients) - len(left_out.failed)),
            "time/clients": trained,
        }
        counts |= self.engine.trainer.facts
        if self.trainer.fleet is not None or self.options.tolerance.on_client_error == "skip":
            counts["clients/failed"] = float(len(left_out.failed))
        counts |= totals
        self._note(LoggedMetrics(counts, counts, {}))

    def _evaluate(self) -> None:
        trainer, options = self.trainer, self.options
        seed_everywhere(seed_for(trainer.seed, Purpose.EVALUATE, trainer.round))
        if trainer.round % options.check_val_every_n_rounds == 0 and trainer.val_loaders:
            with self.guard.watching("the hooks of validation", is_global=True):
                results = evaluate(trainer, trainer.val_loaders, RunningStage.VALIDATING)
            trainer.validated = True
            for result in results:
                self._note(result)
                self._warn_of_nan(result.logged)
        every = options.check_test_every_n_rounds
        if every is not None and trainer.round % every == 0:
            with self.guard.watching("the hooks of testing", is_global=True):
                results = evaluate(trainer, trainer.test_loaders, RunningStage.TESTING)
            for result in results:
                self._note(result)
        if getattr(self.engine.trainer, "evaluated", ()):  # what was sent since, and over how many samples
            self._note(LoggedMetrics(dict(self.engine.trainer.facts), dict(self.engine.trainer.facts), {}))

    def _warn_of_nan(self, metrics: dict[str, float]) -> None:
        """Warns, once in a run, that a validation metric is NaN."""
        names = [name for name, value in metrics.items() if math.isnan(value)]
        if names and not self.warned_of_nan:
            self.warned_of_nan = True
            rank_zero_warn(
                f"The validation of round {self.trainer.round} gives NaN for {', '.join(names)}: it cannot be the "
                "`best`; check the model's `validation_step`, the learning rate and the data."
            )

    def _note(self, metrics: LoggedMetrics) -> None:
        """Adds scalars to the row of the round and to what callbacks may monitor."""
        self.trainer.metrics.update(metrics)
        self.row.update(metrics.logged)
        self.trainer.round_metrics.update({**metrics.logged, **metrics.callback})

    def _finish_round(self, started: float) -> None:
        """Steps schedules, writes the row and then the checkpoint, so that every finished round has its row."""
        trainer = self.trainer
        self.engine.watch.expect_parameters()
        if os.getpid() != self.stop.process:  # else it would write to the same files as its parent
            print("Expected a process that a hook forks to end there, got one that trains on: ended.", file=sys.stderr)
            os._exit(1)
        if trainer.round > 0:
            self.state.optimizer.end_round(trainer.round, self.engine.counts.max_steps, trainer.callback_metrics)
        self._agree()
        with going_on(trainer):
            row = {"round": trainer.round, **self.row, "time/round": time.perf_counter() - started}
            self.log.log_round(row, trainer.metrics.goals)
        self.state.finished_round = trainer.round
        if self.stock is not None:
            with going_on(trainer):
                self.stock.save(trainer, self.module)
        final = not self._continues()
        with nullcontext() if final else going_on(trainer):  # the run's result must not be lost
            self._save(final)
        self.state.epochs = trainer.round
        self.row, trainer.round_metrics, trainer.validated = {}, {}, False

    def _agree(self) -> None:
        """Makes all processes stop after the same round, and checks that they go on with the same numbers."""
        trainer, processes = self.trainer, self.trainer.processes
        if processes.size == 1:
            return
        methods = [cb for cb in trainer.callbacks if isinstance(cb, (Aggregator, ClientAlgorithm))]
        states = [method.state_dict() for method in methods]
        held = checksum(self.state.weights, plain_options(self.state.optimizer.optimizer))
        own = Standing(self.stop.signum, bool(trainer.should_stop), held, kept=checksum(states))
        everyone = processes.exchange(own, "round")
        self.agreed = next((standing.signum for standing in everyone if standing.signum is not None), None)
        self.stop.signum = self.stop.signum or self.agreed
        trainer.should_stop = any(standing.should_stop for standing in everyone)
        expect_same_standing(everyone, trainer.round)
        if len({standing.kept for standing in everyone}) > 1:
            for method, state in zip(methods, state_of_first(processes, states), strict=True):
                if state and processes.rank > 0:  # a checkpoint holds the state of the first process
                    method.load_state_dict(state)

    def _save(self, final: bool) -> None:
        """Writes the checkpoints that are due."""
        if self.checkpoint is not None:
            with self.guard.watching("`on_save_checkpoint`", "on_save_checkpoint" in self.watched):
                self.checkpoint.save(self.trainer, final)
