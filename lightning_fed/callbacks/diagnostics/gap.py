"""Logs how much worse the model is on unseen clients or other distributions than on the training clients' own."""

from typing import Any

from lightning.pytorch import LightningModule

from lightning_fed.core.hooks import FederatedCallback, TrainerLike
from lightning_fed.errors import FederatedError

__all__ = ["DistributionGap"]

_OWN = ("clients", "test")


class DistributionGap(FederatedCallback):
    """Logs, for each test metric, its value on the reference set minus its value on each other test set.

    For example, ``gap/acc/unseen`` is ``test/acc/test`` minus ``test/acc/unseen``. Rounds without a test have no value
    in such columns.

    Args:
        reference: Name of the in-distribution test set; by default ``clients`` if there is one, else ``test``.
    """

    def __init__(self, reference: str | None = None) -> None:
        self.reference = reference

    def on_test_epoch_end(self, trainer: TrainerLike, pl_module: LightningModule) -> None:  # type: ignore[override]  # the trainer is ours
        """Logs the gaps, once all sets have been evaluated."""
        metrics: dict[str, Any] = trainer.callback_metrics  # type: ignore[attr-defined]  # named as in Lightning
        named = {tuple(parts[1:]): value for name, value in metrics.items() if len(parts := name.split("/")) == 3
                 and parts[0] == "test"}  # fmt: skip
        sets = {where for _, where in named}
        own = self.reference or next((name for name in _OWN if name in sets), None)
        if own not in sets or len(sets) < 2:
            raise FederatedError(
                f"Expected several test sets for {type(self).__name__}, one of them {own or ' or '.join(_OWN)}, got "
                f"{', '.join(sorted(sets)) or 'one without a name'}: set `reference` to the in-distribution one, or "
                "leave the callback out."
            )
        for (metric, where), value in named.items():
            if where != own and (metric, own) in named:
                pl_module.log(f"gap/{metric}/{where}", named[metric, own] - value)
