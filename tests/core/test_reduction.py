"""Running sums over a cohort: what they are, and that they cost the same for ten clients and for a thousand."""

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fed.core.reduction import LongSum, RoundReducer
from lightning_fed.core.updates import Client, Need, Update
from lightning_fed.errors import FederatedError

D = 1000


def test_the_former_name_of_the_optimizer_distance_is_the_same_number() -> None:
    update = Update(Client(0, 5, 1), torch.zeros(2), 3)
    update.distance = 0.3
    assert update.optimizer_distance == update.distance == 0.3
    update.optimizer_distance = 0.0
    assert not update.took_step


class NewStorage(TorchDispatchMode):
    """Counts the bytes of every storage that torch makes, and never forgets one."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.alive: dict[int, Any] = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in known}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(tensor, Tensor) and (at := tensor.untyped_storage().data_ptr()) not in self.alive:
                # Held on to, so that no later storage can take the same address.
                self.alive[at] = tensor.untyped_storage()
                self.bytes += tensor.untyped_storage().nbytes()
        return out


def update(i: int, delta: Tensor, weight: float = 1.0, buffers: dict[str, Tensor] | None = None) -> Update:
    return Update(Client(i, 5, 1), delta, 1, buffers or {}, weight)


def bytes_of_a_round(needs: Need, clients: int, with_buffers: bool = False) -> int:
    w, delta = torch.zeros(D), torch.ones(D)
    buffers = {"mean": torch.ones(D), "count": torch.ones(D, dtype=torch.int64)} if with_buffers else {}
    reducer = RoundReducer(w, needs)
    with NewStorage([w, delta, *buffers.values()]) as storage:
        for size in (33, clients):  # the first round shows the vectors that are made once
            storage.bytes = 0
            reducer.reset(size)
            for i in range(size):
                reducer.add(update(i, delta, buffers=buffers), average_buffers=with_buffers)
            reduced = reducer.reduce(1)
    return storage.bytes - reduced.weights.untyped_storage().nbytes()


@pytest.mark.parametrize("needs", [Need.MEAN, Need.SIGN_SUM, Need.MEAN | Need.SIGN_SUM], ids=str)
def test_sums_allocate_nothing_in_a_round(needs: Need) -> None:
    assert bytes_of_a_round(needs, 3) <= 64
    assert bytes_of_a_round(needs, 300) <= 64


def test_buffers_allocate_the_same_for_any_cohort() -> None:
    small, large = (bytes_of_a_round(Need.MEAN, clients, with_buffers=True) for clients in (3, 300))
    assert large == small
    assert small <= 2 * 8 * D + 64


def test_the_probe_sees_what_grows() -> None:
    assert bytes_of_a_round(Need.UPDATES, 300) >= 300 * D * 4


def test_vectors_are_reused_from_round_to_round() -> None:
    reducer = RoundReducer(torch.zeros(D), Need.MEAN | Need.SIGN_SUM | Need.UPDATES)
    places = []
    for clients in (5, 3, 5):
        reducer.reset(clients)
        for i in range(clients):
            reducer.add(update(i, torch.full((D,), float(i + 1))), average_buffers=False)
        reduced = reducer.reduce(1)
        places.append([t.data_ptr() for t in (reduced.mean, reduced.sign_sum, reduced.updates)])
        assert reduced.updates.shape == (clients, D)
        assert reduced.sign_sum.eq(clients).all()
        assert torch.allclose(reduced.mean, torch.tensor((clients + 1) / 2))
    assert places[0] == places[1] == places[2]


def test_agrees_with_numpy() -> None:
    rng = np.random.default_rng(0)
    deltas = rng.normal(size=(6, 8)) * (rng.random((6, 8)) > 0.2)
    weights = [3.0, 1.0, 20.0, 7.0, 2.0, 9.0]
    buffers = rng.normal(size=(6, 4))
    counts = rng.integers(0, 100, size=6)
    reducer = RoundReducer(torch.zeros(8, dtype=torch.float64), Need.MEAN | Need.SIGN_SUM | Need.UPDATES)
    reducer.reset(6)
    for i in range(6):
        own = {"b": torch.tensor(buffers[i]), "n": torch.tensor(counts[i]), "flag": torch.tensor(i == 2)}
        reducer.add(update(i, torch.tensor(deltas[i]), weights[i], own), average_buffers=True)
    reduced = reducer.reduce(4)
    shares = np.array(weights) / sum(weights)
    np.testing.assert_allclose(reduced.mean, shares @ deltas, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(reduced.sign_sum, np.sign(deltas).sum(0))
    np.testing.assert_array_equal(reduced.updates, deltas)
    np.testing.assert_allclose(reduced.weights, shares, rtol=0, atol=1e-12)
    np.testing.assert_allclose(reduced.buffers["b"], shares @ buffers, rtol=0, atol=1e-12)
    assert reduced.buffers["n"].item() == counts.max()
    assert reduced.buffers["flag"].item() is True
    assert (reduced.round, reduced.num_clients, [c.id for c in reduced.clients]) == (4, 6, list(range(6)))


@pytest.mark.parametrize("needs", [Need.MEAN, Need.ABS_SUM, Need.NORMALIZED_MEAN, Need.GRADIENT_MEAN], ids=str)
def test_sums_of_ten_thousand_clients_are_as_exact_as_their_result(needs: Need) -> None:
    clients, rng = 10_000, np.random.default_rng(0)
    rows = rng.normal(0.01, 0.03, (clients, 50)).astype(np.float32)
    sizes, distances = rng.integers(20, 300, clients).astype(float), rng.integers(1, 6, clients)
    reducer = RoundReducer(torch.zeros(50), needs)
    for _ in range(2):  # the vectors of the first round are those of the second
        reducer.reset(clients)
        for i, row in enumerate(map(torch.from_numpy, rows)):
            client = Client(i, int(sizes[i]), 1)
            reducer.add(Update(client, row, 3, {}, sizes[i], int(distances[i]), gradient=row), average_buffers=False)
        (found,) = (getattr(reducer.reduce(1), name) for name in [str(needs.name).lower()])
    shares, exact = sizes.astype(np.longdouble)[:, None] / sizes.sum(), rows.astype(np.longdouble)
    by_hand = {
        Need.ABS_SUM: np.abs(exact), Need.NORMALIZED_MEAN: exact * shares / distances[:, None]
    }.get(needs, exact * shares).sum(0)  # fmt: skip
    error = np.linalg.norm((found.numpy() - by_hand).astype(float)) / np.linalg.norm(by_hand.astype(float))
    assert error < 1e-7  # added up in single precision: 1.4e-6


@pytest.mark.parametrize("count", [0, 1, 32])
def test_a_short_sum_has_the_bits_of_single_precision(count: int) -> None:
    rows = torch.randn(count, 50, generator=torch.Generator().manual_seed(0))
    total, plain = LongSum(torch.zeros(50)), torch.zeros(50)
    for row in rows:
        total.add(row, 3.0)
        plain.add_(row, alpha=3.0)
    assert torch.equal(total.close(), plain)


def test_updates_are_copies_and_inputs_stay_as_they_were() -> None:
    """δ and the buffers are live tensors that the next client overwrites."""
    reducer = RoundReducer(torch.zeros(3), Need.UPDATES)
    reducer.reset(2)
    delta, live = torch.ones(3), {"b": torch.ones(2), "n": torch.tensor(4)}
    reducer.add(update(0, delta, 2.0, live), average_buffers=True)
    assert delta.eq(1).all()
    assert live["b"].eq(1).all()
    delta.fill_(5)
    live["b"].fill_(4)
    live["n"].fill_(1)
    reducer.add(update(1, delta, 1.0, live), average_buffers=True)
    reduced = reducer.reduce(1)
    assert reduced.updates.tolist() == [[1.0] * 3, [5.0] * 3]
    assert reduced.buffers["b"].tolist() == [2.0, 2.0]
    assert reduced.buffers["n"].item() == 4
    assert live["n"].item() == 1


@pytest.mark.parametrize("needs", [Need.MEAN, Need.SIGN_SUM, Need.UPDATES, Need.NOTHING], ids=str)
def test_only_what_is_needed_is_kept(needs: Need) -> None:
    reducer = RoundReducer(torch.zeros(3), needs)
    reducer.reset(1)
    reducer.add(update(0, torch.ones(3), buffers={"b": torch.ones(1)}), average_buffers=False)
    reduced = reducer.reduce(1)
    found = {
        Need.MEAN: reduced.mean.numel(), Need.SIGN_SUM: reduced.sign_sum.numel(), Need.UPDATES: reduced.updates.numel()
    }  # fmt: skip
    assert found == {need: 3 if need in needs else 0 for need in found}
    assert reduced.buffers == {}


def test_a_round_without_clients_is_zero() -> None:
    reducer = RoundReducer(torch.zeros(3), Need.MEAN | Need.SIGN_SUM)
    reducer.reset(1)
    reducer.add(update(0, torch.ones(3), buffers={"b": torch.ones(1)}), average_buffers=True)
    reducer.reduce(1)
    reducer.reset(2)
    reduced = reducer.reduce(2)
    assert reduced.num_clients == 0
    assert reduced.mean.eq(0).all()
    assert reduced.sign_sum.eq(0).all()
    assert reduced.buffers == {}


@pytest.mark.parametrize("weights", [[1.0, -1.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_weights_that_cannot_be_normalised_are_refused(weights: list[float]) -> None:
    reducer = RoundReducer(torch.zeros(3), Need.MEAN)
    reducer.reset(2)
    for i, weight in enumerate(weights):
        reducer.add(update(i, torch.ones(3), weight), average_buffers=False)
    with pytest.raises(FederatedError, match="client_weight"):
        reducer.reduce(1)


def test_clients_without_weight_are_in_the_round_and_in_no_mean() -> None:
    reducer = RoundReducer(torch.zeros(3), Need.MEAN)
    reducer.reset(2)
    for i in range(2):
        reducer.add(update(i, torch.ones(3), 0.0, {"b": torch.ones(2)}), average_buffers=True)
    reduced = reducer.reduce(1)
    assert reduced.num_clients == 2
    assert not reduced.weights.any()
    assert not reduced.mean.any()


@pytest.mark.parametrize("clients", [3, 10, 77])
def test_a_buffer_that_all_agree_on_comes_out_to_the_bit(clients: int) -> None:
    value = torch.linspace(-1, 1, 500) * 0.1307
    reducer = RoundReducer(torch.zeros(3), Need.NOTHING)
    reducer.reset(clients)
    for i in range(clients):
        reducer.add(update(i, torch.ones(3), float(3 + 7 * i), {"b": value}), average_buffers=True)
    assert torch.equal(reducer.reduce(1).buffers["b"].float(), value)


def sums_of(sent: list[dict[str, tuple[Tensor, float]]], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    reducer = RoundReducer(torch.zeros(2, dtype=dtype), Need.MEAN)
    for _ in range(2):  # the second round begins anew
        reducer.reset(len(sent))
        for i, each in enumerate(sent):
            one = update(i, torch.zeros(2, dtype=dtype))
            for name, (value, factor) in each.items():
                one.send(name, value, factor)
            reducer.add(one, average_buffers=False)
        reduced = reducer.reduce(1)
    return reduced.sums


def test_what_is_sent_besides_is_added_up_by_name() -> None:
    values = np.random.default_rng(0).normal(size=(50, 3))
    sent = [
        {"a": (torch.tensor(v), 0.5)} | ({"b": (torch.tensor(v[0]), 1.0)} if i % 2 else {})
        for i, v in enumerate(values)
    ]
    found = sums_of(sent, torch.float64)
    np.testing.assert_allclose(found["a"].numpy(), 0.5 * values.sum(axis=0), rtol=0, atol=1e-12)
    assert found["b"].item() == float(sum(values[1::2, 0].tolist()))  # a number alone, one by one
    assert sums_of([{}]) == {}


def test_a_long_sum_besides_loses_nothing() -> None:
    found = sums_of([{"a": (torch.full((2,), 0.1), 1.0)}] * 30_000)
    np.testing.assert_allclose(found["a"].numpy(), 30_000 * np.float32(0.1), rtol=1e-6)


def test_a_name_that_is_sent_no_more_keeps_no_memory() -> None:
    reducer, kept = RoundReducer(torch.zeros(2), Need.NOTHING), []
    for name in ("a", "b", "b", "b"):
        reducer.reset(1)
        one = update(0, torch.zeros(2))
        one.send(name, torch.ones(2))
        reducer.add(one, average_buffers=False)
        kept.append(weakref.ref(reducer.reduce(1).sums[name]))
    assert kept[0]() is None
    assert kept[1]() is kept[3]() is not None, "one that is sent again is used again"


def test_a_name_is_of_one_kind() -> None:
    with pytest.raises(FederatedError, match="of one shape and dtype as 'a'"):
        sums_of([{"a": (torch.zeros(2), 1.0)}, {"a": (torch.zeros(3), 1.0)}])


def test_only_what_is_not_implied_is_counted() -> None:
    one = update(0, torch.zeros(2))
    one.send("a", torch.zeros(2, 3))
    one.send("a number", torch.zeros(()))
    one.send("known", torch.zeros(2), implied=True)
    assert one.numbers_beside == 6
