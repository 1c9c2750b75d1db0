"""Codecs against NumPy on one update, over rounds, and in what they cost."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedCallback, FederatedError, callbacks
from lightning_fed.aggregators import FedAvg
from lightning_fed.callbacks import QSGD, ClipUpdates, Payload, RandomK, TopK
from lightning_fed.core.updates import Client, Update
from lightning_fed.masks import SignAgreement
from tests.parts import Classifier, built, federated_data, federated_trainer, leaves

CODECS = {"TopK": lambda: TopK(0.3), "RandomK": lambda: RandomK(0.3), "QSGD": lambda: QSGD(2)}
SIZE = 4810


def fit(folder: Path, *parts: Any, net: Any = Classifier, engine: str = "sequential", **options: Any) -> Any:
    trainer = federated_trainer(folder, *parts, engine=engine, **{"max_rounds": 3, "logger": [], **options})
    trainer.fit(built(net), federated_data(12, 9, 5), **({"ckpt_path": "last"} if "name" in options else {}))
    return trainer


def coded(codec: Any, delta: Tensor, round: int = 1, client: int = 0) -> tuple[Tensor, int]:
    """Returns what the server gets of an update, and its bytes."""
    states = SimpleNamespace(recall=lambda key, client, out: out.zero_())
    trainer: Any = SimpleNamespace(seed=0, round=round, weights=delta, client_states=states)
    update = Update(Client(client, 5, round), delta.clone(), 1)
    codec.on_client_end(trainer, None, update)
    return update.delta, update.bytes_up


def some_update(size: int = SIZE, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_every_codec_of_the_package_is_in_the_suite() -> None:
    payloads = {kind.__name__ for kind in leaves(Payload) if not kind.__name__.startswith("_")}
    assert payloads == {*CODECS, "ClipUpdates", "CentralDP", "LocalDP"}
    assert payloads <= set(callbacks.__all__)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.3, 1.0])
def test_top_k_keeps_the_largest(share: float) -> None:
    delta = some_update()
    sent, _ = coded(TopK(share), delta)
    order, kept = np.argsort(-np.abs(delta.numpy())), max(1, round(share * SIZE))
    expected = np.zeros(SIZE)
    expected[order[:kept]] = delta.numpy()[order[:kept]]
    assert np.array_equal(sent, expected)


@pytest.mark.parametrize(("count", "places"), [(8, 6), (10, 8), (11, 8)])
def test_top_k_sends_indices_or_a_map_whichever_is_shorter(count: int, places: int) -> None:
    """Of 64 coordinates: indices of 6 bits, 48 or 60 of them, then a map of 64 in place of 66."""
    assert coded(TopK(count / 64), some_update(64))[1] == 8 * count + places


def test_random_k_scales_what_it_draws() -> None:
    delta, codec = some_update(), RandomK(0.1)
    places = [coded(codec, delta, round, client)[0].nonzero().flatten() for round, client in ((1, 0), (1, 1), (2, 0))]
    assert [len(drawn) for drawn in places] == [481] * 3
    assert len({tuple(drawn.tolist()) for drawn in places}) == 3
    sent, _ = coded(codec, delta)
    np.testing.assert_allclose(sent[places[0]], delta[places[0]] * 10, rtol=1e-15)


@pytest.mark.parametrize("levels", [1, 4, 1000])
def test_qsgd_sends_the_level_below_or_above(levels: int) -> None:
    delta = some_update()
    sent, size = coded(QSGD(levels), delta)
    step = float(np.float32(np.linalg.norm(delta))) / levels
    np.testing.assert_allclose(sent / step, (sent / step).round(), rtol=0, atol=1e-9)
    assert ((sent - delta).abs() < step * (1 + 1e-6)).all()
    assert size == 4 + -(-SIZE * int(np.ceil(np.log2(2 * levels + 1))) // 8)


@pytest.mark.parametrize("codec", [RandomK(0.1), QSGD(1), QSGD(4)], ids=["random-k", "qsgd 1", "qsgd 4"])
def test_the_mean_over_draws_is_the_update(codec: Any) -> None:
    """The length of the mean error beside what 3,000 draws leave of it by chance, which is 1."""

    def beside_chance(codec: Any) -> float:
        total, square = torch.zeros_like(delta), torch.zeros_like(delta)
        for round in range(3000):
            error = coded(codec, delta, round)[0] - delta
            total += error
            square += error**2
        return float((total / 3000).norm() / (square.sum() / 3000**2).sqrt())

    delta = some_update(400)
    assert 0.5 < beside_chance(codec) < 2.5
    if isinstance(codec, RandomK):
        assert beside_chance(TopK(0.1)) > 10


@pytest.mark.parametrize("codec", [TopK(0.1), RandomK(0.1), QSGD()])
def test_zero_and_what_is_not_finite_pass(codec: Any) -> None:
    """The engine finds who diverged by what comes out; it is no mistake of the codec's."""
    assert not coded(codec, torch.zeros(9))[0].any()
    one = torch.zeros(9)
    one[3] = -2.5
    if not isinstance(codec, RandomK):
        assert torch.equal(coded(codec, one)[0], one)
    for bad in (float("nan"), float("inf")):
        assert not coded(codec, torch.full((9,), bad))[0].isfinite().all()


def wide() -> Classifier:
    return Classifier(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("codec", "size"), [(TopK(), 270), (RandomK(), 1924), (QSGD(), 2409), (TopK(0.5), 2405 * 4 + 602), (TopK(1e-9), 6)]
)
def test_bytes_are_those_of_the_parts(tmp_path: Path, codec: Any, size: int, engine: str) -> None:
    """48 values of 4 bytes and as many places of 13 bits; 481 values; 4 bits each and a length; a map of d bits."""
    trainer = federated_trainer(tmp_path, codec, engine=engine, max_rounds=2)
    samples = TensorDataset(torch.randn(26, 64), torch.arange(26) % 10)
    data = federated_data(12, 9, 5, dataset=samples, val_dataset=samples)
    trainer.fit(built(wide), data)
    assert len(trainer.weights) == SIZE
    assert trainer.totals["comm/bytes_up"] == 2 * 3 * size


class Books(FederatedCallback):
    """Adds up what client 0 meant to send and what the server got of it."""

    def __init__(self) -> None:
        self.total: Any = 0.0

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.total = self.total + update.delta * (update.client.id == 0)


class Got(Books):
    pass


class Kept(FederatedCallback):
    """Notes what three clients keep, after each round."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        rows = trainer.weights.new_zeros(3, len(trainer.weights))
        for client, row in enumerate(rows):
            trainer.client_states.recall("TopK", client, row)
        self.rows.append(rows)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_what_is_sent_and_the_rest_are_what_was_meant(tmp_path: Path, engine: str) -> None:
    meant, got, kept = Books(), Got(), Kept()
    parts = (meant, TopK(0.1), got, ClipUpdates(1e-3), kept)
    fit(tmp_path, *parts, engine=engine, max_rounds=50, precision="64-true")
    rest = kept.rows[-1][0]
    assert rest.norm() > 0.01
    assert (got.total + rest - meant.total).abs().max() < 1e-12
    assert len(got.total.nonzero()) > 2, "places take turns, as what is left of others grows"


class Fails(Classifier):
    """In round 2 client 0 diverges and client 1 takes no step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.round != 2:
            return loss
        return {0: loss * float("nan"), 1: None}.get(self.trainer.client.id, loss)


def test_a_client_that_does_not_enter_keeps_its_rest(tmp_path: Path) -> None:
    kept = Kept()
    trainer = fit(tmp_path, TopK(0.1), kept, net=Fails, max_diverged=0.5, max_rounds=3)
    assert trainer.weights.isfinite().all()
    changed = [
        [not torch.equal(a, b) for a, b in zip(*pair, strict=True)]
        for pair in zip(kept.rows, kept.rows[1:], strict=False)
    ]
    assert changed == [[False, False, True], [True, True, True]]


@pytest.mark.parametrize("name", CODECS)
def test_engines_agree_and_a_resumed_run_is_the_same_to_the_bit(tmp_path: Path, name: str) -> None:
    one, other = (fit(tmp_path, CODECS[name](), engine=engine) for engine in ("sequential", "vectorized"))
    assert torch.allclose(one.weights, other.weights, rtol=0, atol=1e-6)
    assert not torch.allclose(one.weights, fit(tmp_path, FedAvg()).weights, rtol=0, atol=1e-4)
    for rounds in (1, 3):
        resumed = fit(tmp_path, CODECS[name](), max_rounds=rounds, name="kept", enable_checkpointing=True)
    assert torch.equal(resumed.weights, one.weights)


def test_a_zero_is_no_vote(tmp_path: Path) -> None:
    """One of three clients sends a coordinate: they agree by a third, so a mask scales its step by that."""

    class Alone(Payload):
        def encode(self, trainer: Any, pl_module: Any, update: Any) -> None:
            update.delta.mul_(update.client.id == 0)

    plain, masked = (fit(tmp_path, FedAvg(mask=mask), Alone(), max_rounds=1) for mask in (None, SignAgreement(0.4)))
    start = torch.nn.utils.parameters_to_vector(built(Classifier).parameters()).detach()
    torch.testing.assert_close(masked.weights - start, (plain.weights - start) / 3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TopK(0.0), "Expected `share` of TopK to be above 0 and at most 1, got 0.0"),
        (lambda: RandomK(1.5), "Expected `share` of RandomK to be above 0 and at most 1, got 1.5"),
        (lambda: QSGD(0), "Expected `levels` of QSGD to be an integer of at least 1, got 0"),
    ],
)
def test_options_out_of_range_are_refused(make: Any, words: str) -> None:
    with pytest.raises(FederatedError, match=words):
        make()
