"""A recurrent network from characters to the scores of the next one."""

import torch
from torch import Tensor, nn

from lightning_fed.errors import FederatedError
from lightning_fed.models.backbones import Backbone, check_counts

__all__ = ["CharLSTM"]


class CharLSTM(Backbone):
    """Predicts the next character with an LSTM; 133,629 parameters for 81 characters.

    Characters become vectors of ``embedding_dim`` values and go through ``num_layers`` layers of ``hidden_size`` units.
    A linear layer makes scores from the last output. The defaults are those of Dandi et al., "Implicit Gradient
    Alignment in Distributed and Federated Learning", AAAI 2022, appendix B.5, on windows of 80 characters.

    Args:
        num_classes: Number of different characters, at least 1.
        embedding_dim: Values of each character's vector.
        hidden_size: Units of each LSTM layer.
        num_layers: LSTM layers.
    """

    def __init__(
        self, num_classes: int = 81, embedding_dim: int = 8, hidden_size: int = 100, num_layers: int = 2
    ) -> None:
        super().__init__()
        check_counts(self, num_classes=num_classes, embedding_dim=embedding_dim)
        check_counts(self, hidden_size=hidden_size, num_layers=num_layers)
        self.embedding = nn.Embedding(num_classes, embedding_dim)
        self.lstm = nn.LSTM(embedding_dim, hidden_size, num_layers, batch_first=True)
        self.linear = nn.Linear(hidden_size, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Computes logits (B, num_classes) from windows of characters, int64 (B, T), T > 0, refusing others."""
        # This runs in every local step: two comparisons, and more only for a mistake.
        if x.ndim != 2 or x.dtype != torch.int64:
            raise FederatedError(
                f"CharLSTM expected windows of characters, int64 of shape (B, T), got {x.dtype} of shape "
                f"{tuple(x.shape)}: choose `--data Shakespeare` or other text, or another `--model.backbone`."
            )
        outputs, _ = self.lstm(self.embedding(x))
        logits: Tensor = self.linear(outputs[:, -1])
        return logits
