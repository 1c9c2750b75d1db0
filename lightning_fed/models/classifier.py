"""Classification as a LightningModule."""

from collections.abc import Iterable, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable, ReduceLROnPlateau
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed.errors import FederatedError
from lightning_fed.models.backbones import Backbone
from lightning_fed.models.losses import cross_entropy

__all__ = ["Classifier", "ImageClassifier", "class_scores"]


class Classifier(LightningModule):
    """Trains a network with cross-entropy and measures loss and accuracy: of images, or of the next character.

    It has nothing federated in it, and also trains under the stock Lightning Trainer. It logs ``val/loss``,
    ``val/acc``, ``test/loss`` and ``test/acc``; accuracies are shares in [0, 1].

    Args:
        backbone: Network from inputs (B, ...) to logits (B, num_classes).
        num_classes: Number of classes.
        optimizer: Makes an optimizer from parameters.
        lr_scheduler: Makes a learning rate scheduler from the optimizer; none if left out.
    """

    def __init__(
        self,
        backbone: Backbone | nn.Module,
        num_classes: int = 10,
        optimizer: OptimizerCallable = lambda params: SGD(params, lr=0.01),
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        for name, made in (("optimizer", optimizer), ("lr_scheduler", lr_scheduler or callable)):
            if not callable(made):
                raise FederatedError(
                    f"Expected `--model.{name}` to be a class or a function that makes one, got {type(made).__name__}."
                )
        # The command line describes the arguments by class_path and init_args. In Python they are objects, which do not
        # belong in a checkpoint: `load_from_checkpoint` then needs them again. Lightning has no public way to tell the
        # two apart.
        from_command_line = _given_hyperparameters.get() is not None
        self.save_hyperparameters(ignore=[] if from_command_line else ["backbone", "optimizer", "lr_scheduler"])
        self.backbone = backbone
        self.num_classes = num_classes
        self._make_optimizer = optimizer
        self._make_lr_scheduler = lr_scheduler
        # The metrics' own checks synchronise with the device on every batch; cross-entropy refuses wrong labels anyway.
        self.val_acc = MulticlassAccuracy(num_classes, average="micro", validate_args=False)
        self.test_acc = MulticlassAccuracy(num_classes, average="micro", validate_args=False)

    def forward(self, x: Tensor) -> Tensor:
        """Computes logits of shape (B, num_classes), refusing a backbone that returns another shape."""
        logits: Tensor = self.backbone(x)
        if logits.ndim != 2 or logits.shape[1] != self.num_classes:
            raise FederatedError(
                f"Expected {type(self.backbone).__name__} to return scores of shape (B, {self.num_classes}), got "
                f"{tuple(logits.shape)}: give `--model.num_classes` and `--model.backbone.num_classes` the same value."
            )
        return logits

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Returns the mean cross-entropy of a batch (inputs, labels) as a scalar tensor."""
        x, y = batch
        return cross_entropy(self(x), y)

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Logs ``val/loss`` and ``val/acc`` of a batch (inputs, labels)."""
        self._evaluate(batch, "val", self.val_acc)

    def evaluate_samples(self, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        """Returns what validation logs the mean of: loss and accuracy of each sample of a batch, shape (B,) each."""
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y, reduction="none"), "acc": (logits.argmax(dim=1) == y).float()}

    def test_step(self, batch: Sequence[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Logs ``test/loss`` and ``test/acc`` of a batch (inputs, labels)."""
        self._evaluate(batch, "test", self.test_acc)

    def predict_step(self, batch: Tensor | Sequence[Tensor], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Returns class probabilities of shape (B, num_classes) for inputs, or for a batch (inputs, labels)."""
        x = batch if isinstance(batch, Tensor) else batch[0]
        logits: Tensor = self(x)
        return logits.softmax(dim=1)

    def _evaluate(self, batch: Sequence[Tensor], stage: str, accuracy: MulticlassAccuracy) -> None:
        x, y = batch
        logits = self(x)
        accuracy.update(logits, y)
        self.log(f"{stage}/loss", F.cross_entropy(logits, y), prog_bar=False, batch_size=len(y))
        self.log(f"{stage}/acc", accuracy, prog_bar=True, batch_size=len(y))

    def configure_optimizers(self) -> Any:
        """Returns a fresh optimizer over the parameters, with its scheduler if there is one."""
        parameters: Iterable[nn.Parameter] = self.parameters()
        optimizer = self._make_optimizer(parameters)
        if self._make_lr_scheduler is None:
            return optimizer
        scheduler = self._make_lr_scheduler(optimizer)
        config: dict[str, Any] = {"scheduler": scheduler}
        if isinstance(scheduler, ReduceLROnPlateau):
            config["monitor"] = scheduler.monitor
        return {"optimizer": optimizer, "lr_scheduler": config}


class ImageClassifier(Classifier):
    """The same as ``Classifier``, under the name of its main use."""


def class_scores(module: LightningModule, batch: Any, advice: str = "") -> tuple[Tensor, Tensor]:
    """Returns a module's scores for a batch (inputs, labels), shape (B, C), and the labels, shape (B,).

    Args:
        module: The module.
        batch: Inputs and labels; ``forward`` gets the inputs.
        advice: What to do if the model has diverged; the end of that message.
    """
    expected = (
        f"Expected {type(module).__name__} to be a classifier, whose `forward` returns finite scores of shape (B, C) "
        "for the inputs of a batch (inputs, labels), labels from 0 to C - 1"
    )
    if not isinstance(batch, (list, tuple)) or len(batch) != 2:
        raise FederatedError(f"{expected}, got a batch that is {_shown(batch)}.")
    scores, labels = module(batch[0]), batch[1]
    integers = isinstance(labels, Tensor) and not labels.is_floating_point() and labels.ndim == 1
    several = isinstance(scores, Tensor) and scores.ndim == 2 and scores.shape[1] > 1
    if not integers or not several or len(scores) != len(labels):
        raise FederatedError(f"{expected}, got {_shown(scores)} for labels that are {_shown(labels)}.")
    if not scores.isfinite().all():
        raise FederatedError(f"{expected}, got NaN or infinity: the model has diverged{advice}.")
    if not ((labels >= 0) & (labels < scores.shape[1])).all():
        ends = f"{labels.min()} to {labels.max()}"
        raise FederatedError(f"{expected}, got labels from {ends} for {scores.shape[1]} scores.")
    return scores, labels


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    parts = f" of {len(value)}" if isinstance(value, (list, tuple)) else ""
    return f"a {type(value).__name__}{parts}"
