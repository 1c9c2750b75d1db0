"""Ends a trial's run early whose best value so far is worse than the median of the others at the same round."""

from typing import Any

from lightning.pytorch import LightningModule

from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.lab.runner.tuning import optuna_storage
from lightning_fed.lab.studies.cells import Watch

__all__ = ["Pruning"]

_FIRST = 0.2
_BETWEEN_RUNS = 10**6


class Pruning(FederatedCallback):
    """Reports a metric to Optuna after each round, and stops where its median pruner says so.

    It compares after a fifth of the rounds, as Dandi et al., AAAI 2022 (appendix B.2), do; ``pruned`` says whether it
    has stopped the run.
    """

    def __init__(self, watch: Watch) -> None:
        import optuna

        storage = optuna_storage(watch.storage)
        study = optuna.load_study(study_name=watch.study, storage=storage, pruner=optuna.pruners.MedianPruner())
        self._trial = optuna.trial.Trial(study, study.trials[watch.number]._trial_id)
        self._watch, self.pruned = watch, False

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Compares the newest value with that of other trials at the same round of the same run of theirs."""
        value = trainer.callback_metrics.get(self._watch.metric)
        if value is None or trainer.round < _FIRST * trainer.max_rounds:
            return
        try:
            self._trial.report(float(value), self._watch.run * _BETWEEN_RUNS + trainer.round)
            self.pruned = self._trial.should_prune()
        except RuntimeError:  # another run of the trial has been ended early
            self.pruned = True
        trainer.should_stop = trainer.should_stop or self.pruned
