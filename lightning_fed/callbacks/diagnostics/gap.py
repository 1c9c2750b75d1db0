"""Logs how much worse the model is on unseen clients and out-of-distribution sets than on clients like its own."""

from typing import Any

from lightning.pytorch import LightningModule

from lightning_fed.core.hooks import FederatedCallback, TrainerLike
from lightning_fed.errors import FederatedError

__all__ = ["DistributionGap"]

_OWN = ("clients", "test")


class DistributionGap(FederatedCallback):
    """Logs, of each metric of several test sets, its value on the reference set less that on each other set.

    Of the columns ``test/acc/test`` and ``test/acc/unseen`` it makes ``gap/acc/unseen`` = test - unseen. Rounds without
    a test have no such column.

    Args:
        reference: Name of the test set that is in distribution; by default ``clients`` if there is one, else ``test``.
    """

    def __init__(self, reference: str | None = None) -> None:
        self.reference = reference

    def on_test_epoch_end(self, trainer: TrainerLike, pl_module: LightningModule) -> None:  # type: ignore[override]  # our trainer stands in
        """Logs the gaps, once all sets have been evaluated."""
        metrics: dict[str, Any] = trainer.callback_metrics  # type: ignore[attr-defined]  # one of Lightning's names
        named = {tuple(parts[1:]): value for name, value in metrics.items() if len(parts := name.split("/")) == 3
                 and parts[0] == "test"}  # fmt: skip
        sets = {where for _, where in named}
        own = self.reference or next((name for name in _OWN if name in sets), None)
        if own not in sets or len(sets) < 2:
            raise FederatedError(
                f"Expected several test sets for {type(self).__name__}, one of them {own or ' or '.join(_OWN)}, got "
                f"{', '.join(sorted(sets)) or 'one without a name'}: name the one in distribution as `reference`, or "
                "leave the callback out."
            )
        for (metric, where), value in named.items():
            if where != own and (metric, own) in named:
                pl_module.log(f"gap/{metric}/{where}", named[metric, own] - value)
