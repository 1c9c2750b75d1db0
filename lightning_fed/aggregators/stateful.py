"""The base of aggregators that remember vectors from round to round."""

from typing import Any

import torch
from torch import Tensor

from lightning_fed.aggregators.base import Aggregator

__all__ = ["StatefulAggregator"]


class StatefulAggregator(Aggregator):
    """Keeps server state: vectors of shape (d,) by name, forgotten at a new ``fit`` and saved with the checkpoint.

    Attributes:
        vectors: The state after the last round; empty before the first.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.vectors: dict[str, Tensor] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forgets the state of a former ``fit``."""
        if stage == "fit":
            self.vectors = {}

    def recall(self, name: str, like: Tensor, initial: float = 0.0) -> Tensor:
        """Returns a vector of the state, filled with ``initial`` before the first round.

        Args:
            name: Name of the vector.
            like: Tensor of shape (d,) whose dtype and device the vector gets, as a checkpoint loads on the CPU.
            initial: Value of every element before the first round.
        """
        kept = self.vectors.get(name)
        return torch.full_like(like, initial) if kept is None else kept.to(like)

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of the vectors."""
        return {name: vector.clone() for name, vector in self.vectors.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        self.vectors = dict(state_dict)
