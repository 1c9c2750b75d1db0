"""The LSTM over characters: its formula, what it learns, and inputs that it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fed import FederatedTrainer
from lightning_fed.data import FederatedDataModule
from lightning_fed.errors import FederatedError
from lightning_fed.models import CharLSTM, Classifier, ImageClassifier

QUIET: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}


def by_hand(model: CharLSTM, x: Tensor) -> Tensor:
    """The equations of an LSTM with forget gates, character after character."""
    weights = dict(model.lstm.named_parameters())
    inputs = list(model.embedding.weight[x].unbind(dim=1))
    for layer in range(model.lstm.num_layers):
        wx, wh, bx, bh = (weights[f"{name}_l{layer}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        h = c = torch.zeros(len(x), model.lstm.hidden_size)
        outputs = []
        for value in inputs:
            i, f, g, o = (value @ wx.T + bx + h @ wh.T + bh).chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        inputs = outputs
    return inputs[-1] @ model.linear.weight.T + model.linear.bias


def test_formula_and_size() -> None:
    torch.manual_seed(0)
    model = CharLSTM()
    assert sum(p.numel() for p in model.parameters()) == 133_629
    x = torch.randint(81, (4, 80))
    assert torch.allclose(model(x), by_hand(model, x), atol=1e-5)
    small = CharLSTM(num_classes=5, embedding_dim=3, hidden_size=4, num_layers=1)
    x = torch.randint(5, (2, 7))
    assert tuple(small(x).shape) == (2, 5)
    assert torch.allclose(small(x), by_hand(small, x), atol=1e-6)


def test_clients_learn_a_sequence(tmp_path: Path) -> None:
    """The next character is the first of the window: memory over the whole window, not over its end, tells it."""
    torch.manual_seed(0)
    x = torch.randint(3, (300, 6))
    data = FederatedDataModule(TensorDataset(x, x[:, 0]), num_clients=3, batch_size=20, split_seed=0)
    model = Classifier(
        CharLSTM(3, hidden_size=16), num_classes=3, optimizer=lambda params: torch.optim.Adam(params, lr=0.02)
    )
    trainer = FederatedTrainer(
        max_rounds=8,
        clients_per_round=3,
        local_epochs=2,
        seed=0,
        default_root_dir=str(tmp_path),
        enable_progress_bar=False,
        **QUIET,
    )
    trainer.fit(model, datamodule=data)
    accuracy = (model(x).argmax(dim=1) == x[:, 0]).float().mean()
    assert accuracy > 0.95


@pytest.mark.parametrize("name", ["num_classes", "embedding_dim", "hidden_size", "num_layers"])
def test_counts_below_one(name: str) -> None:
    with pytest.raises(FederatedError, match=rf"{name}` of CharLSTM to be an integer of at least 1, got 0"):
        CharLSTM(**{name: 0})


@pytest.mark.parametrize("x", [torch.zeros(2, 1, 28, 28), torch.zeros(2, 80), torch.zeros(80, dtype=torch.int64)])
def test_other_inputs(x: Tensor) -> None:
    with pytest.raises(FederatedError, match=r"CharLSTM expected windows of characters, int64 of shape \(B, T\)"):
        CharLSTM()(x)


def test_the_former_name_is_the_same_module() -> None:
    module = ImageClassifier(CharLSTM(), num_classes=81)
    assert isinstance(module, Classifier)
    assert dict(module.hparams) == {"num_classes": 81}
