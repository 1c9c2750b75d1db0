"""Attackers: what each sends, by hand, who they are, and that others train as ever."""

from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_fed import FederatedCallback
from lightning_fed.aggregators import FedAvg, Krum
from lightning_fed.client_algorithms import ALIE, IPM, FedProx, GaussianNoise, LabelFlip, SignFlip
from lightning_fed.data import FederatedDataModule
from lightning_fed.errors import FederatedError
from lightning_fed.functional import supported_deviations
from lightning_fed.lab.testing import expect_engines_agree, expect_resumes, local_ends, train_quadratics
from tests.engines.parts import SIZES, Model, agree, data, train

ONE_AND_TWO = {"clients": [1, 2]}
KINDS = [SignFlip, GaussianNoise, LabelFlip, ALIE, IPM]


class Sent(FederatedCallback):
    """Keeps what each client sends, by round and client."""

    needs = FedAvg.needs

    def __init__(self) -> None:
        self.deltas: dict[tuple[int, int], np.ndarray] = {}

    def on_client_entered(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.deltas[update.client.round, update.client.id] = update.delta.numpy().copy()


def sent(*parts: Any, **options: Any) -> np.ndarray:
    """What the three clients send in the first round."""
    seen = Sent()
    train_quadratics(*parts, seen, steps=2, **options)
    return np.stack([seen.deltas[1, client] for client in range(3)])


HONEST = local_ends(np.ones(2), 2) - 1


@pytest.mark.parametrize(
    ("attack", "forged"),
    [
        (SignFlip(**ONE_AND_TWO), -HONEST[1:]),
        (SignFlip(100.0, **ONE_AND_TWO), 100 * HONEST[1:]),
        (GaussianNoise(0.0, **ONE_AND_TWO), HONEST[1:]),
        (IPM(0.3, **ONE_AND_TWO), np.tile(-0.3 * HONEST[1:].mean(0), (2, 1))),
        (ALIE(1.5, **ONE_AND_TWO), np.tile(HONEST[1:].mean(0) - 1.5 * HONEST[1:].std(0), (2, 1))),
        (ALIE(clients=[2]), HONEST[2:]),  # alone it knows no deviation
    ],
)
def test_what_attackers_send_is_that_by_hand(attack: Any, forged: np.ndarray) -> None:
    found = sent(attack)
    expected = np.concatenate([HONEST[: 3 - len(forged)], forged])
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_what_colluding_attackers_know_is_plain_training_even_beside_a_method() -> None:
    attack, method = IPM(1.0, clients=[1, 2]), FedProx(5.0)
    np.testing.assert_allclose(sent(method, attack)[2], -HONEST[1:].mean(0), rtol=1e-12)
    np.testing.assert_allclose(sent(method, attack)[0], sent(method)[0], rtol=1e-12)


def test_noise_is_of_the_size_of_the_update_and_new_in_each_round(tmp_path: Path) -> None:
    seen, plain = Sent(), Sent()
    for parts in ((GaussianNoise(10.0, clients=[0]), seen), (plain,)):
        train(tmp_path, lambda: Model(nn.Linear(6, 3)), "sequential", *parts, max_rounds=2, local_steps=1)
    honest, forged = plain.deltas[1, 0], seen.deltas[1, 0]
    noise = (forged - honest) / (10 * np.sqrt((honest**2).mean()))
    assert 0.5 < noise.std() < 1.5
    assert abs(np.corrcoef(noise, seen.deltas[2, 0])[0, 1]) < 0.9
    assert np.array_equal(seen.deltas[1, 1], plain.deltas[1, 1])


def test_flipped_labels_give_the_gradient_of_flipped_labels(tmp_path: Path) -> None:
    class Flipped(Model):
        def forward(self, x: Any) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return F.cross_entropy(self(x), 2 - y if self.flips else y)

        flips = False

    class ByHand(Flipped):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.flips = self.trainer.client.id in (1, 3)
            return super().training_step(batch, batch_idx)

    attack = partial(LabelFlip, clients=[1, 3])
    one = train(tmp_path, Flipped, "sequential", attack())
    torch.testing.assert_close(one.state, train(tmp_path, ByHand, "sequential").state, rtol=1e-12, atol=1e-14)
    agree(one, train(tmp_path, Flipped, "vectorized", attack()))
    assert one.logged["update/attackers"] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_without_attackers_it_is_as_without_the_attack_to_the_bit(kind: Any, tmp_path: Path) -> None:
    class Calls(Model):
        def forward(self, x: Any) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.cross_entropy(self(batch[0]), batch[1])

    runs = [train(tmp_path, Calls, "sequential", *parts) for parts in ((kind(share=0.0),), ())]
    assert all(torch.equal(a, b) for a, b in zip(*(run.state.values() for run in runs), strict=True))


@pytest.mark.parametrize("kind", [SignFlip, GaussianNoise, ALIE, IPM])
@pytest.mark.parametrize("check", [expect_engines_agree, expect_resumes])
def test_engines_and_resumed_runs_agree(kind: Any, check: Any) -> None:
    check(lambda: [kind(share=0.5)])


def attackers(attack: Any, tmp_path: Path, seed: int = 1, **options: Any) -> frozenset[int]:
    train(tmp_path, Model, "sequential", attack, max_rounds=1, seed=seed, **options)
    return attack.attackers


def test_who_attacks_is_drawn_by_the_seed_among_those_with_samples(tmp_path: Path) -> None:
    first = attackers(SignFlip(share=0.4), tmp_path)
    assert len(first) == 2  # of five with samples
    assert first == attackers(IPM(share=0.4), tmp_path), "the same under every attack"
    assert any(first != attackers(SignFlip(share=0.4), tmp_path, seed) for seed in (2, 3, 4))
    drawn = frozenset().union(*(attackers(SignFlip(share=0.4), tmp_path, seed) for seed in range(6)))
    assert SIZES.index(0) not in drawn
    assert len(attackers(SignFlip(share=0.01), tmp_path)) == 1


def test_attackers_have_names(tmp_path: Path) -> None:
    parts = {name: data().load_datasets().train for name in ("north", "south")}
    attack = SignFlip(clients=["south"])
    assert attackers(attack, tmp_path, datamodule=FederatedDataModule(parts)) == {1}
    with pytest.raises(
        FederatedError, match=r"`--client.clients` of SignFlip .* numbers below 2 of clients, got 'west'"
    ):
        attackers(SignFlip(clients=["west"]), tmp_path, datamodule=FederatedDataModule(parts))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SignFlip(clients=[6]), "numbers below 6 of clients, got 6"),
        (lambda: SignFlip(clients=[True]), "got True"),
        (lambda: IPM(epsilon=0.0), "`--client.epsilon`"),
        (lambda: ALIE(z=-1.0), "`--client.z`"),
        (lambda: GaussianNoise(share=1.0), "`--client.share`"),
    ],
)
def test_mistakes_are_one_sentence(make: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match=said):  # of the constructor, or before the first round
        train(tmp_path, Model, "sequential", make())


@pytest.mark.parametrize(
    ("clients", "corrupted", "honest_beyond"), [(20, 4, 7), (50, 12, 14), (3, 2, 1), (2, 1, 1), (5, 4, 1), (1, 1, 1)]
)
def test_deviations_leave_as_many_honest_clients_beyond(clients: int, corrupted: int, honest_beyond: int) -> None:
    honest = max(clients - corrupted, 1)
    share = min(max(1 - honest_beyond / honest, 0.5), 1 - 0.5 / honest)
    assert supported_deviations(clients, corrupted) == pytest.approx(NormalDist().inv_cdf(share))


def test_a_little_is_enough_to_be_chosen_by_krum() -> None:
    """Against five clients of which two collude, Krum follows them: what they send lies in the middle of the others."""
    rng = np.random.default_rng(0)
    clients = {"strengths": np.ones(9), "targets": 5 + rng.normal(size=(9, 2))}
    seen = Sent()
    w = train_quadratics(Krum(2), ALIE(0.3, clients=[3, 7, 8]), seen, steps=1, **clients)
    np.testing.assert_allclose(w - 1, seen.deltas[1, 3], rtol=1e-12)
    assert not np.allclose(w, train_quadratics(Krum(2), steps=1, **clients))
