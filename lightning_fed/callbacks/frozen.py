"""Parameters that stay as they are, chosen by their names."""

from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.vector import names_like

__all__ = ["FrozenParameters"]


class FrozenParameters(FederatedCallback):
    """Freezes parameters for the whole of ``fit``: no client trains them, and they are neither sent nor averaged.

    With ``["*lora_A*"]`` on a model with LoRA it is FFA-LoRA (Sun, Li, Li, Ding, "Improving LoRA in Privacy-preserving
    Federated Learning", ICLR 2024): the mean of the B_i A_0 is that of the B_i times A_0, which it is not for two
    factors that both train.

    Args:
        names: Patterns of parameter names, such as ``backbone.*``; ``backbone`` means all below it.
    """

    stacks = True

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self._frozen: list[nn.Parameter] = []

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            trained = {name: p for name, p in pl_module.named_parameters() if p.requires_grad}
            frozen = names_like(tuple(trained), self.names, "names` of `FrozenParameters")
            self._frozen = [p for name, p in trained.items() if name in frozen]
            for parameter in self._frozen:
                parameter.requires_grad_(False)

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Lets them require gradients again, as before."""
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._frozen = []
