"""The public checks for a method of one's own: what the package has passes them, and what is wrong does not."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lightning_fed import Need
from lightning_fed.aggregators import Aggregator
from lightning_fed.client_algorithms import ClientAlgorithm
from lightning_fed.lab.testing import (
    LR,
    STRENGTHS,
    TARGETS,
    expect_any_order,
    expect_engines_agree,
    expect_resumes,
    local_ends,
    train_quadratics,
)
from tests.composition.client_parts import ALONE
from tests.composition.composition_parts import RULES
from tests.parts import quick_first

CHECKS = (expect_any_order, expect_engines_agree, expect_resumes)
METHODS: dict[str, Callable[[], Any]] = {name: lambda make=rule.make: [make()] for name, rule in RULES.items()}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", quick_first(6, METHODS))
def test_every_rule_passes(check: Any, name: str) -> None:
    if (check, name) != (expect_any_order, "PCGrad"):  # which draws an order
        check(METHODS[name])


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", ["FedProx", "SCAFFOLD", "FedGA", "FedCM", "FedSAM", "PFedMe"])
@pytest.mark.quick(8)
def test_client_algorithms_pass(check: Any, name: str) -> None:
    check(ALONE[name].make)


def test_plain_rounds_are_those_by_hand() -> None:
    w = np.ones(2)
    for _ in range(3):
        w = w + np.average(local_ends(w, 2) - w, axis=0, weights=(2, 1, 3))
    np.testing.assert_allclose(train_quadratics(rounds=3, steps=2, sizes=(2, 1, 3)), w, rtol=1e-12)
    end = np.ones((3, 2))
    for _ in range(2):
        end = end - LR * STRENGTHS[:, None] * (end - TARGETS)
    np.testing.assert_allclose(local_ends(np.ones(2), 2), end, rtol=1e-12)


class First(Aggregator):
    """Follows the client with the lowest number."""

    needs = Need.UPDATES

    def server_step(self, update: Any) -> Any:
        return update.updates[0].clone()


class Forgetful(Aggregator):
    """Has a memory that no checkpoint keeps."""

    memory: Any = 0

    def server_step(self, update: Any) -> Any:
        self.memory = 0.5 * self.memory + update.mean
        return self.memory


class Shared(ClientAlgorithm):
    """Says that it stacks, but keeps what the client that was last has set."""

    stacks = True

    def on_client_start(self, trainer: Any, pl_module: Any, client: Any) -> None:
        self.strength = float(client.num_samples)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        trainer.vector.add_to_gradient(trainer.vector.data - trainer.origin, alpha=self.strength)


@pytest.mark.parametrize(
    ("check", "make", "said"),
    [
        (expect_any_order, First, "clients in another order"),
        (expect_resumes, Forgetful, "after a resume"),
        (expect_engines_agree, Shared, "vectorized after sequential"),
    ],
)
def test_what_is_wrong_is_seen(check: Any, make: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check(lambda: [make()])
    for other in CHECKS:
        if other is not check:
            other(lambda: [make()])
