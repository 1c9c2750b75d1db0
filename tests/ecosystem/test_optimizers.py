"""Public optimizers: two clients with the same data send the same update in every round, or a sentence refuses it."""

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.errors import FederatedError
from tests.parts import CLASSES, FEATURES, Classifier, federated_data, federated_trainer, points

PACKAGES = ("pytorch_optimizer", "schedulefree")


def around(kind: Any, module: nn.Module) -> Any:
    return kind(SGD(module.parameters(), lr=0.1, momentum=0.9))


def sharp(kind: Any, module: nn.Module) -> Any:
    return kind(module.parameters(), SGD, lr=0.1, momentum=0.9)


def by_shape(kind: Any, module: nn.Module) -> Any:
    matrices, others = ([p for p in module.parameters() if (p.ndim == 2) is is_matrix] for is_matrix in (True, False))
    return kind([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}])


def whole(kind: Any, module: nn.Module) -> Any:
    return kind(module, lr=0.01)


# Those that want other arguments than parameters and a rate.
BUILT: dict[str, Any] = {
    **dict.fromkeys(("Lookahead", "OrthoGrad", "PCGrad", "SafeFP16Optimizer", "TRAC"), around),
    **dict.fromkeys(("ScheduleFreeWrapper", "ScheduleFreeWrapperReference"), around),
    **dict.fromkeys(("FriendlySAM", "LookSAM", "SAM"), sharp),
    **dict.fromkeys(("AdaGO", "AdaMuon", "Muon", "MuonClip", "NorMuon"), by_shape),
    **dict.fromkeys(("AdaLOMO", "AdamMini", "LOMO"), whole),
    "BSAM": lambda kind, module: kind(module.parameters(), num_data=8),
    "Ranger21": lambda kind, module: kind(module.parameters(), num_iterations=36, lr=0.01),
    "SaRA": lambda kind, module: kind(module.parameters(), threshold=1.0, lr=0.01),
    "WSAM": lambda kind, module: kind(module, module.parameters(), SGD, lr=0.1, momentum=0.9),
}


def made(kind: Any, module: nn.Module) -> Any:
    if kind.__name__ in BUILT:
        return BUILT[kind.__name__](kind, module)
    try:
        return kind(module.parameters(), lr=0.01)
    except TypeError:
        return kind(module.parameters())


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def exported() -> list[Any]:
    """Every class of the packages that steps parameters and can be built here: some want a GPU or other packages."""
    found = []
    for package in PACKAGES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                held = vars(import_module(package))
            except ImportError:
                continue
            for name, kind in sorted(held.items()):
                if isinstance(kind, type) and hasattr(kind, "step") and hasattr(kind, "zero_grad"):
                    try:
                        made(kind, net())
                    except Exception:
                        continue
                    found.append(pytest.param(kind, id=f"{package}.{name}"))
    return found


class Deltas(FederatedCallback):
    """Keeps the updates of each round; all clients draw the same random numbers."""

    def __init__(self) -> None:
        self.rounds: dict[int, list[Tensor]] = {}

    def on_client_start(self, trainer: Any, pl_module: Any, client: Any) -> None:
        torch.manual_seed(0)

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.rounds.setdefault(trainer.round, []).append(update.delta.clone())


@pytest.mark.parametrize("kind", exported())
def test_ecosystem_optimizers_are_fresh_for_each_client_or_refused(kind: Any, tmp_path: Path) -> None:
    x, y = (column[:1].expand(16, *column.shape[1:]) for column in points(1).tensors)  # in any order the same
    data = federated_data(8, 8, dataset=TensorDataset(x, y), val_dataset=None)
    torch.manual_seed(1)
    deltas, refused = Deltas(), ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages themselves
        try:
            trainer = federated_trainer(tmp_path, deltas, max_rounds=3, local_epochs=12)
            trainer.fit(Classifier(net(), lambda module: made(kind, module)), data)
        except FederatedError as error:
            refused = str(error)
    if refused:
        assert refused.startswith("Expected ")
        assert kind.__name__ in refused
        return
    assert list(deltas.rounds) == [1, 2, 3]
    for one, other in deltas.rounds.values():
        assert one.any()
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6 * float(one.norm()))
