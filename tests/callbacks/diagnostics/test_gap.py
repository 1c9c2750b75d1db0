"""The gap between test sets, as a column of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fed.callbacks.diagnostics import DistributionGap
from lightning_fed.errors import FederatedError
from tests.callbacks.diagnostics.test_dissimilarity import columns
from tests.parts import Classifier, federated_data, federated_trainer, points


class Tested(Classifier):
    def test_step(self, batch: Any, *_: Any) -> None:
        self.log("test/loss", self.loss(batch))


def run(folder: Path, sets: Any, gap: DistributionGap) -> Any:
    torch.manual_seed(0)
    kept: dict[str, Any] = {"logger": [], "enable_checkpointing": True}
    trainer = federated_trainer(folder, gap, max_rounds=3, check_test_every_n_rounds=2, **kept)
    trainer.fit(Tested(), federated_data(test_dataset=sets))
    return trainer


def test_each_set_has_a_gap_in_rounds_that_are_tested(tmp_path: Path) -> None:
    sets = {"test": points(9, seed=1), "unseen": points(7, seed=2), "rotated": points(8, seed=3)}
    trainer = run(tmp_path, sets, DistributionGap())
    found = columns(trainer)
    tested = list(found["test/loss/test"])
    assert 1 not in tested
    for name in ("unseen", "rotated"):
        expected = [found["test/loss/test"][round] - found[f"test/loss/{name}"][round] for round in tested]
        assert list(found[f"gap/loss/{name}"]) == tested
        assert list(found[f"gap/loss/{name}"].values()) == pytest.approx(expected, abs=1e-6)
    assert "gap/loss/test" not in found
    others = run(tmp_path / "other", sets, DistributionGap("rotated"))
    assert set(columns(others)) >= {"gap/loss/test", "gap/loss/unseen"}
    assert torch.equal(others.weights, trainer.weights)


def test_held_out_samples_of_clients_are_the_reference_where_there_are_any(tmp_path: Path) -> None:
    sets = {"clients": points(9, seed=1), "test": points(7, seed=2)}
    found = columns(run(tmp_path, sets, DistributionGap()))
    assert "gap/loss/test" in found
    assert "gap/loss/clients" not in found


@pytest.mark.parametrize(
    ("sets", "reference", "says"),
    [
        ({"": None}, None, "one of them clients or test, got one without a name"),
        ({"a": None, "b": None}, None, "got a, b"),
        ({"test": None, "b": None}, "c", "one of them c, got b, test"),
    ],
)
def test_without_two_sets_there_is_a_sentence(tmp_path: Path, sets: Any, reference: Any, says: str) -> None:
    sets = points(5) if "" in sets else {name: points(5) for name in sets}
    with pytest.raises(FederatedError, match=f"Expected several test sets for DistributionGap, .*{says}"):
        run(tmp_path, sets, DistributionGap(reference))
