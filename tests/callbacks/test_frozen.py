"""Parameters frozen by the patterns of their names, on a layer with two factors, as LoRA has them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_fed.aggregators import FedAvg
from lightning_fed.callbacks import FrozenParameters
from lightning_fed.errors import FederatedError
from lightning_fed.masks import SignAgreement
from tests.parts import CLASSES, FEATURES, Classifier, federated_data, federated_trainer


class LowRank(Classifier):
    """Scores x A B + c."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(FEATURES, CLASSES)
        self.lora_A, self.lora_B = nn.Linear(FEATURES, 2, bias=False), nn.Linear(2, CLASSES, bias=False)
        self.lora_A.requires_grad_(not frozen)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return cross_entropy(self.net(x) + self.lora_B(self.lora_A(x)), y)


def train(folder: Path, net: Any, *callbacks: Any, rounds: int = 4, **options: Any) -> Any:
    trainer = federated_trainer(folder, FedAvg(mask=SignAgreement()), *callbacks, max_rounds=rounds, **options)
    trainer.fit(net, federated_data(8, 12, 20), ckpt_path="last")
    return trainer


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_it_is_the_run_of_a_module_that_freezes_them_itself(engine: Any, tmp_path: Path) -> None:
    net, start = LowRank(), LowRank().lora_A.weight.detach()
    found = train(tmp_path / "named", net, FrozenParameters(["lora_A"]), engine=engine)
    itself = train(tmp_path / "itself", LowRank(frozen=True), engine=engine)
    assert torch.equal(found.weights, itself.weights)
    assert found.totals["comm/bytes_up"] == itself.totals["comm/bytes_up"]
    assert torch.equal(net.lora_A.weight, start)
    assert all(p.requires_grad for p in net.parameters())
    assert len(train(tmp_path / "all", LowRank(), engine=engine).weights) == len(found.weights) + 2 * FEATURES


def test_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    options: dict[str, Any] = {"enable_checkpointing": True, "name": "run"}
    whole = train(tmp_path / "whole", LowRank(), FrozenParameters(["*A*"]), **options)
    train(tmp_path / "parts", LowRank(), FrozenParameters(["*A*"]), rounds=2, **options)
    found = train(tmp_path / "parts", LowRank(), FrozenParameters(["*A*"]), **options)
    assert found.resumed
    assert torch.equal(found.weights, whole.weights)


def test_a_pattern_that_fits_nothing_is_refused_with_the_names(tmp_path: Path) -> None:
    sentence = "for the pattern `lora_C` in `names` of `FrozenParameters`, got net.weight, net.bias, lora_A.weight"
    with pytest.raises(FederatedError, match=sentence):
        train(tmp_path, LowRank(), FrozenParameters(["lora_C"]))
