"""The trainer: one Fabric loop over rounds, independent of any algorithm."""

import signal
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_fed.aggregators import Aggregator
from lightning_fed.callbacks import FederatedCheckpoint, FederatedProgressBar
from lightning_fed.callbacks.progress import model_summary
from lightning_fed.client_algorithms import ClientAlgorithm
from lightning_fed.core import ShownInNotebooks
from lightning_fed.core.files import writing
from lightning_fed.core.hooks import HookCaller
from lightning_fed.core.recorder import LoggedMetrics
from lightning_fed.core.seeding import Purpose, seed_everywhere, seed_for
from lightning_fed.core.train_state import CompileMode, EngineName, FullGradients, NoState, Tolerance, TrainState
from lightning_fed.data.batch_sources import BatchSource
from lightning_fed.errors import FederatedError
from lightning_fed.runs.checkpoint_files import save_checkpoint
from lightning_fed.runs.folder import RunFolder
from lightning_fed.sampling import Participation, UniformSampler
from lightning_fed.trainer.bookkeeping import Bookkeeping, graceful_stop
from lightning_fed.trainer.callback_order import order_callbacks
from lightning_fed.trainer.checkpoint_contents import save_checkpoints, save_last_good, save_model
from lightning_fed.trainer.client_evaluation import evaluate_clients, plain_updates
from lightning_fed.trainer.evaluation import by_set, evaluate, predict, print_results, say_whose, scored_batches
from lightning_fed.trainer.fabric import make_fabric, set_determinism
from lightning_fed.trainer.forwarding import derived, forwarded
from lightning_fed.trainer.lightning_names import LightningNames
from lightning_fed.trainer.options import expect_module, make_options, training_data
from lightning_fed.trainer.setup import attached, evaluating, train

__all__ = ["FederatedTrainer"]


class FederatedTrainer(LightningNames, ShownInNotebooks):
    """Trains a LightningModule over simulated clients, round by round.

    Arguments have the same names as in Lightning's Trainer wherever they mean the same.

    Args:
        accelerator: ``cpu``, ``gpu``, ``auto``, ...
        devices: Devices to use on each machine. With several, there is one process for each, and they share every
            cohort. ``auto`` is one device, or one for each process that torchrun started.
        num_nodes: Machines to use.
        strategy: Fabric strategy: ``auto``, or ``clients`` for processes that share a cohort.
        precision: ``32-true``, ``64-true``, ``bf16-mixed``, ``bf16-true``. The global model has at least float32.
        memory_format: Layout of 2-D convolutions in ``fit``. ``preserve`` keeps the module's. ``channels_last`` is
            usually faster, changes the last bits and stays in the module. ``auto`` uses ``channels_last`` only where
            it was measured to be faster, and restores the module's layout at the end.
        logger: Lightning loggers; by default W&B, online if you are logged in. False also turns off metrics.csv.
        callbacks: Lightning callbacks, aggregators and client algorithms, in any order.
        default_root_dir: Where run folders are made: DEFAULT_ROOT_DIR/NAME/version_K.
        name: NAME of the run folder; by default made of the aggregator, mask and client algorithms.
        seed: The run's seed; by default that of ``seed_everything``, else 0.
        max_rounds: Rounds to train; you can also write ``max_epochs``.
        clients_per_round: Clients drawn each round, a count (int) or a fraction (float).
        engine: ``sequential`` trains the clients of a cohort one after another, ``vectorized`` many at once, with the
            same results up to rounding. ``auto`` chooses ``vectorized`` if module, data and clients allow the same
            results and it is expected to be faster.
        chunk_size: Clients that train at once in the vectorized engine; by default as many as fit into memory.
        compile: Whether to compile ``training_step`` by ``torch.compile``, for the sequential engine; or its mode
            (true means ``default``).
        local_epochs: Epochs of a client over its own data in a round; 1 unless you give ``local_steps``. 0.5 is the
            first half of a shuffled epoch, rounded to whole steps, at least one.
        local_steps: Optimizer steps of a client in a round, instead of ``local_epochs``.
        local_schedule: Whether learning-rate schedules with interval ``step`` restart for each client and round.
        participation: Which clients take part in a round, and how much each trains: ``Participation``.
        full_gradients: How a gradient over all of a client's data is computed, if a method needs it:
            ``FullGradients``.
        tolerance: Which failures a run tolerates: ``Tolerance``.
        client_states: Where client state, such as control variates, is stored between rounds: on the ``device``, in
            ``host`` memory or on ``disk``. Checkpoints always store it on disk.
        check_val_every_n_rounds: Rounds between validations; round 0, before any training, is always validated.
        check_test_every_n_rounds: Rounds between evaluations on the test sets during ``fit``; by default none.
            Test metrics are only logged, never used to choose a model.
        limit_val_batches: Validation batches to run, as a count (int) or a fraction (float).
        limit_test_batches: The same for test batches.
        limit_predict_batches: The same for prediction batches.
        gradient_clip_val: Bound of a client's gradient in each local step; larger gradients are clipped.
        gradient_clip_algorithm: Whether to clip the gradient's ``norm`` (the default) or each ``value``.
        accumulate_grad_batches: Batches whose gradients are combined into one local step.
        deterministic: Whether torch must use deterministic algorithms; ``warn`` only warns if there is none.
        fast_dev_run: Trial run: n rounds of n steps (true: 1) with two clients (more if the aggregator needs them),
            without logging and checkpoints; of ``participation`` only the sampler is used.
        enable_progress_bar: Whether to show progress bars, in a terminal or a notebook.
        enable_checkpointing: Whether to write ``last`` and ``best`` checkpoints.
        max_time: Time after which no new round begins: ``DD:HH:MM:SS``, a timedelta or a dict for one.
        enable_model_summary: Whether to show the module's layers before the first round.
        benchmark: Whether cuDNN measures which of its algorithms is fastest; by default torch's setting is kept.
        detect_anomaly: Whether to name the forward operation that causes a NaN in the backward pass.
        **lightning: Options of the three groups by their own names, such as ``sampler`` of ``participation``. Other
            arguments of Lightning's Trainer are accepted if there is such an option here; else the error says what to
            use.
    """

    def __init__(
        self,
        accelerator: str = "auto",
        devices: list[int] | str | int = "auto",
        num_nodes: int = 1,
        strategy: str = "auto",
        precision: str | int = "32-true",
        memory_format: Literal["auto", "preserve", "channels_last"] = "auto",
        logger: Logger | list[Logger] | bool | None = None,
        callbacks: list[Callback] | Callback | None = None,
        default_root_dir: str = "runs",
        name: str | None = None,
        seed: int | None = None,
        max_rounds: int = 100,
        clients_per_round: int | float = 1.0,
        engine: EngineName = "auto",
        chunk_size: int | None = None,
        compile: bool | CompileMode = False,
        local_epochs: int | float | None = None,
        local_steps: int | None = None,
        local_schedule: Literal["restart", "continue"] = "restart",
        participation: Participation | None = None,
        full_gradients: FullGradients | None = None,
        tolerance: Tolerance | None = None,
        client_states: Literal["device", "host", "disk"] = "device",
        check_val_every_n_rounds: int = 1,
        check_test_every_n_rounds: int | None = None,
        limit_val_batches: int | float = 1.0,
        limit_test_batches: int | float = 1.0,
        limit_predict_batches: int | float = 1.0,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] | None = None,
        accumulate_grad_batches: int = 1,
        deterministic: bool | Literal["warn"] = False,
        fast_dev_run: bool | int = False,
        enable_progress_bar: bool = True,
        enable_checkpointing: bool = True,
        max_time: str | timedelta | dict[str, int] | None = None,
        enable_model_summary: bool = True,
        benchmark: bool | None = None,
        detect_anomaly: bool = False,
        **lightning: Any,
    ) -> None:
        given = make_options(locals(), lightning)
        self.options = given.shortened()
        self.fabric = make_fabric(given)
        set_determinism(given.deterministic, benchmark)
        sampler = given.participation.sampler
        self.sampler = UniformSampler() if sampler is None else sampler
        self.callbacks = order_callbacks(
            callbacks,
            FederatedProgressBar() if given.enable_progress_bar else None,
            FederatedCheckpoint() if self.options.enable_checkpointing else None,
            Timer(duration=max_time, interval="epoch") if max_time is not None else None,
            model_summary() if given.enable_model_summary else None,
        )
        self.aggregator = next(cb for cb in self.callbacks if isinstance(cb, Aggregator))
        self.hooks = HookCaller(self)
        self.books = Bookkeeping(given, self.label)
        self.state, self.train_state = TrainerState(), cast(TrainState, NoState())
        self.lightning_module, self.datamodule = cast(LightningModule, None), None
        self.metrics, self.round_metrics = LoggedMetrics({}, {}, {}), {}
        self.validated = self.resumed = self.should_stop = False
        self.loggers, self.val_loaders, self.test_loaders, self.predict_loaders = [], {}, {}, {}

    name: str = forwarded("books.name", "The run's name below ``default_root_dir``.")
    default_root_dir: Path = forwarded("books.root", "The folder in which run folders are made.")
    run: RunFolder | None = forwarded("books.run", "The run's folder, None if nothing is written.")
    run_config: dict[str, Any] | None = forwarded("books.run_config", "The command line's config.", settable=True)
    interrupted: int | None = forwarded("books.interrupted", "The signal that ended the last call early.")
    stop_message: str = forwarded("books.stop_message", "How to resume after that signal.")

    @property
    def label(self) -> str:
        """A short name of the method, such as ``FedAvg+SignAgreement``."""
        algorithms = [type(cb).__name__ for cb in self.callbacks if isinstance(cb, ClientAlgorithm)]
        return "+".join([self.aggregator.label, *algorithms])

    log_dir: str | None = derived(
        lambda self: None if self.run is None else str(self.run.path), "The run's folder, as Lightning calls it."
    )

    def save_checkpoints(self, *names: str) -> None:
        """Writes the checkpoint of the last finished round under these names, if the run has a folder."""
        if self.run is not None and names:
            save_checkpoints(self, self.run, [self.run.checkpoints / f"{name}.ckpt" for name in names])

    def save_checkpoint(self, filepath: Any, weights_only: bool | None = None, storage_options: Any = None) -> None:
        """Writes a checkpoint that this trainer and Lightning's can read.

        If written between two rounds, as by ModelCheckpoint, a run can resume from it. Otherwise, or with
        ``weights_only``, it holds only the model. ``storage_options`` are ignored: files are written to disk.
        """
        path = Path(filepath)
        if self.run is None or self.run.path.absolute() not in path.absolute().parents:
            with writing(path, "filepath"):
                path.parent.mkdir(parents=True, exist_ok=True)
        finished = isinstance(self.train_state, TrainState) and self.round == self.finished_round
        if finished and self.run is not None and not weights_only:
            save_checkpoints(self, self.run, [path])
        else:
            save_model(self, path)

    def save_last_good(self) -> None:
        """Writes the weights of the last finished round as ``last_good``, if a ``fit`` with a run folder failed."""
        if self.run is not None and isinstance(self.train_state, TrainState):
            save_last_good(self, self.run.checkpoints)

    def evaluate_clients(self, source: BatchSource, clients: Sequence[int], *model: Any) -> dict[int, dict[str, float]]:
        """Returns what ``validation_step`` logs of a model on each client's samples, by client and name."""
        return evaluate_clients(self, source, clients, getattr(self.datamodule, "eval_batch_size", None), *model)

    def plain_updates(self, clients: Sequence[int]) -> Tensor:
        """Returns the updates of plain local training of clients, (n, d), in a hook that all processes call."""
        return plain_updates(self, clients)

    def scored_batches(self) -> Iterator[tuple[str, Any, Tensor, Tensor]]:
        """Yields set, batch, scores and labels over the test sets, or the validation sets if there are none."""
        return scored_batches(self)

    # The four calls of a Lightning user

    def fit(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
        weights: str | None = None,
    ) -> None:
        """Trains the model over clients.

        Args:
            model: The LightningModule; after the call it holds the global model.
            train_dataloaders: A data loader, whose data set is split over clients, or a data module; by default the
                model's own.
            val_dataloaders: Data loaders to validate on, together with ``train_dataloaders``.
            datamodule: Gives the clients' batches, validation and test sets. Training data of a plain data module are
                split over the default number of clients.
            ckpt_path: Resume from ``last``, the newest checkpoint of a run with the same config (if there is none, a
                new run starts), from ``best``, or from a path.
            weights_only: Accepted as in Lightning; code in a checkpoint is never run.
            weights: Start a new run from the weights of a checkpoint or a saved state_dict. If ``ckpt_path`` finds a
                checkpoint, that is used instead.
        """
        model = expect_module(model, "training_step")
        data = training_data(self.fleet, model, datamodule, train_dataloaders, val_dataloaders)
        books = self.books
        books.initial_weights, books.interrupted, books.stop_message = weights, None, ""
        with graceful_stop(self.is_global_zero) as stop, books.lock:
            try:
                with attached(self, model, data, TrainerFn.FITTING):
                    train(self, stop, ckpt_path, weights)
            except KeyboardInterrupt:
                books.report_end(self, signal.SIGINT)

    def validate(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
        weights: str | None = None,
    ) -> list[dict[str, float]]:
        """Evaluates a model on the validation sets.

        Args:
            model: The LightningModule; by default that of the last call, with the weights of its best checkpoint.
            dataloaders: The validation sets as data loaders, or a data module; by default the model's own.
            datamodule: Gives the validation sets; by default those of the last call.
            ckpt_path: Checkpoint to evaluate: ``last`` or ``best`` of a run with the same config, or a path.
            weights_only: Accepted as in Lightning; code in a checkpoint is never run.
            weights: Weights to evaluate, a checkpoint or a saved state_dict.
            verbose: Whether to print the results.

        Returns:
            A dict of metrics for each validation set.
        """
        return self._evaluate(RunningStage.VALIDATING, verbose, model, dataloaders, datamodule, ckpt_path, weights)

    def test(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
        weights: str | None = None,
    ) -> list[dict[str, float]]:
        """Evaluates a model on the test sets; the arguments are those of ``validate``."""
        return self._evaluate(RunningStage.TESTING, verbose, model, dataloaders, datamodule, ckpt_path, weights)

    test.__doc__ = str(validate.__doc__).replace("validation", "test")  # the command line's help reads it

    def predict(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
        weights: str | None = None,
        output: str | None = None,
    ) -> list[Any] | None:
        """Runs ``predict_step`` over the prediction set, or over the test sets of data without one.

        Args:
            model: The LightningModule; by default that of the last call, with the weights of its best checkpoint.
            dataloaders: The prediction set as data loaders, or a data module; by default the model's own.
            datamodule: Gives the prediction set; by default that of the last call.
            return_predictions: Whether to return them; if false, none is kept that nobody writes at the end.
            ckpt_path: Checkpoint to use: ``last`` or ``best`` of a run with the same config, or a path.
            weights_only: Accepted as in Lightning; code in a checkpoint is never run.
            weights: Weights to use, a checkpoint or a saved state_dict.
            output: File to save the predictions in, those of named sets as a dict; read it with ``torch.load``.

        Returns:
            What ``predict_step`` returned for each batch; a list of such lists for several prediction sets.
        """
        if output is not None and not Path(output).absolute().parent.is_dir():
            raise FederatedError(f"Expected `--output` to be in an existing folder, got {output}: make it first.")
        with evaluating(self, "predict", model, dataloaders, datamodule, ckpt_path, weights) as loaders:
            seed_everywhere(seed_for(self.seed, Purpose.PREDICT))
            predictions = predict(self, loaders, keep=output is not None or return_predictions is not False)
        if output is not None and self.is_global_zero:
            save_checkpoint(by_set(loaders, predictions), Path(output), "--output")
        elif self.run_config is not None:
            rank_zero_info("The predictions were not saved: give a file as `--output` to save them.")
        return None if return_predictions is False else predictions

    def _evaluate(self, stage: RunningStage, verbose: bool, *given: Any) -> list[dict[str, float]]:
        with evaluating(self, stage.value, *given) as loaders:
            seed_everywhere(seed_for(self.seed, Purpose.EVALUATE))
            results = [metrics.logged for metrics in evaluate(self, loaders, stage)]
        if verbose and self.is_global_zero:
            print_results(list(loaders), results)
            say_whose(self.callbacks if results else ())
        return results
