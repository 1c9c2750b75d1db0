"""The two batch sources give the same batches; evaluation batches are slices."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from lightning_fed.data import BatchSource, FederatedDataModule, Split, TensorSource
from lightning_fed.data.batch_sources import EvalBatches, LoaderSource, WrappedSource
from lightning_fed.data.collation import Loading
from lightning_fed.errors import FederatedError
from tests.parts import OneByOne, same

N = 41
X = torch.arange(N * 6, dtype=torch.float32).reshape(N, 2, 3)
Y = torch.arange(N) % 5


TENSORS = {"x": X, "y": Y}
DICTS = OneByOne(N, lambda row: {"x": X[row], "y": Y[row]}, tensors=TENSORS, samples_are_rows=True)


def noisy(row: int) -> dict[str, Any]:
    """Draws from every global random stream, as augmentations do."""
    drawn = {"python": random.random(), "numpy": np.random.rand()}
    return {"x": X[row] + torch.rand(()), **drawn, "y": int(Y[row])}


NOISY = OneByOne(N, noisy)


class Flipped(TensorDataset):
    """A tensor data set that changes its samples on the way out."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self.tensors[0][index].flip(0), self.tensors[1][index]


@pytest.fixture(params=["tuple", "dict", "subset"])
def dataset(request: pytest.FixtureRequest) -> Dataset[Any]:
    plain = TensorDataset(X, Y)
    return {"tuple": plain, "dict": DICTS, "subset": Subset(plain, list(range(N - 1, 10, -1)))}[request.param]


def sources(dataset: Dataset[Any], **options: Any) -> tuple[BatchSource, BatchSource]:
    made = [
        FederatedDataModule(dataset, num_clients=4, batch_size=3, split_seed=1, in_memory=in_memory, **options)
        for in_memory in (True, False)
    ]
    return made[0].train_source(), made[1].train_source()


@pytest.mark.parametrize("make", [lambda split: TensorSource((X, Y), split, 3), lambda _: EvalBatches((X, Y), 3, None)])
def test_data_larger_than_the_device_are_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    def full(tensor: Tensor, device: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 90.00 GiB.")

    source = make(Split.of([np.arange(N)]))
    monkeypatch.setattr(Tensor, "to", full)
    with pytest.raises(FederatedError, match=r"memory of cuda:1, .*: set `--data.in_memory false`, .*\.$"):
        source.to("cuda:1")


def test_what_else_a_device_says_of_data_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(tensor: Tensor, device: Any) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Tensor, "to", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        EvalBatches((X, Y), 3, None).to("cuda")


def test_the_right_source_is_chosen(dataset: Dataset[Any]) -> None:
    fast, slow = sources(dataset)
    assert type(fast) is TensorSource
    assert type(slow) is LoaderSource
    assert isinstance(fast, BatchSource)
    assert isinstance(slow, BatchSource)


def test_both_sources_give_the_batches_of_default_collate(dataset: Dataset[Any]) -> None:
    fast, slow = sources(dataset)
    split = FederatedDataModule(dataset, num_clients=4, split_seed=1).split
    assert fast.sizes.tolist() == slow.sizes.tolist() == split.sizes.tolist()
    for client in (2, 0, 3, 1, 2):
        order = torch.randperm(int(fast.sizes[client]))
        rows = split.index[split.offsets[client] :][order.numpy()].tolist()
        expected = [default_collate([dataset[row] for row in rows[k : k + 3]]) for k in range(0, len(rows), 3)]
        assert same(list(fast.batches(client, order, seed=0)), expected)
        assert same(list(slow.batches(client, order, seed=0)), expected)


@given(sizes=st.lists(st.integers(0, 7), min_size=1, max_size=6), batch_size=st.integers(1, 8), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_every_sample_once_and_the_last_short_batch_kept(sizes: list[int], batch_size: int, seed: int) -> None:
    total = sum(sizes)
    values = torch.arange(total)
    ends = np.cumsum([0, *sizes])
    split = Split.of([np.arange(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)])
    generator = torch.Generator().manual_seed(seed)
    pair = (TensorSource((values,), split, batch_size), LoaderSource(TensorDataset(values), split, Loading(batch_size)))
    for client, size in enumerate(sizes):
        order = torch.randperm(size, generator=generator)
        fast, slow = ([batch[0].tolist() for batch in source.batches(client, order, seed)] for source in pair)
        assert fast == slow
        assert sum(fast, []) == [int(ends[client]) + k for k in order.tolist()]
        assert [len(batch) for batch in fast[:-1]] == [batch_size] * (len(fast) - 1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_reads_depend_on_the_seed_alone(num_workers: int) -> None:
    order = torch.arange(10)

    def read(source: BatchSource, client: int, seed: int) -> list[Any]:
        return list(source.batches(client, order, seed))

    def make(workers: int) -> BatchSource:
        options: Any = {"num_clients": 4, "batch_size": 4, "split_seed": 0, "num_workers": workers}
        return FederatedDataModule(NOISY, **options).train_source()

    source = make(num_workers)
    first = read(source, 1, seed=5)
    read(source, 0, seed=7)
    torch.manual_seed(123)
    assert same(read(source, 1, seed=5), first), "the client's draws do not depend on the clients before it"
    assert not same(read(source, 1, seed=6), first)
    assert not torch.equal(first[0]["python"][:2], first[1]["python"][:2]), "batches draw different numbers"
    assert same(read(make(0), 1, seed=5), first), "nor on the number of workers"


def test_an_abandoned_client_leaves_nothing_behind() -> None:
    source = FederatedDataModule(NOISY, num_clients=2, batch_size=2, split_seed=0, num_workers=1).train_source()
    order = torch.arange(20)
    expected = list(source.batches(1, order, seed=3))
    half: Iterator[Any] = iter(source.batches(0, order, seed=4))
    next(half)
    half.close()
    assert same(list(source.batches(1, order, seed=3)), expected)


@pytest.mark.parametrize("in_memory", [True, False])
def test_global_random_state_is_untouched(in_memory: bool) -> None:
    dataset = TensorDataset(X, Y) if in_memory else NOISY
    source = FederatedDataModule(dataset, num_clients=2, split_seed=0).train_source()
    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert len(list(source.batches(0, torch.arange(5), seed=1))) == 1
    assert random.getstate() == state[0]
    assert np.random.get_state()[1].tolist() == state[1]
    assert torch.equal(torch.get_rng_state(), state[2])


def test_one_loader_serves_all_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []
    original = DataLoader.__init__
    monkeypatch.setattr(DataLoader, "__init__", lambda self, *a, **k: (built.append(self), original(self, *a, **k))[1])
    source = FederatedDataModule(NOISY, num_clients=8, split_seed=0).train_source()
    for client in range(8):
        list(source.batches(client, torch.arange(int(source.sizes[client])), seed=0))
    assert len(built) == 1


def test_computed_samples_are_never_bypassed() -> None:
    data = FederatedDataModule(Flipped(X, Y), num_clients=1, batch_size=N, split_seed=0)
    source = data.train_source()
    assert type(source) is LoaderSource
    [batch] = source.batches(0, torch.arange(N), seed=0)
    assert torch.equal(batch[0], X.flip(1))


class Rare(TensorDataset):
    """A tensor data set that changes few of its samples, so that most equal the rows."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return (-x if index == 3 else x), y


class Inherits(TensorDataset):
    """A tensor data set with a method more and nothing computed."""

    def classes(self) -> int:
        return 5


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Subset(d, range(N))], ids=["whole", "subset"])
def test_a_class_with_its_own_getitem_is_read_by_it_unless_it_vouches_for_its_rows(wrap: Any) -> None:
    class Vouches(Rare):
        samples_are_rows = True

    def read(dataset: TensorDataset) -> tuple[type, Tensor]:
        source = FederatedDataModule(wrap(dataset), num_clients=1, batch_size=N, split_seed=0).train_source()
        [batch] = source.batches(0, torch.arange(N), seed=0)
        return type(source), batch[0]

    changed = X.clone()
    changed[3] *= -1
    for dataset, kind, expected in (
        (Rare(X, Y), LoaderSource, changed),
        (Vouches(X, Y), TensorSource, X),
        (Inherits(X, Y), TensorSource, X),
        (TensorDataset(X, Y), TensorSource, X),
    ):
        chosen, x = read(dataset)
        assert chosen is kind, type(dataset).__name__
        assert torch.equal(x, expected), type(dataset).__name__


def test_batches_are_copies() -> None:
    x = X.clone()
    source = FederatedDataModule(TensorDataset(x, Y), num_clients=1, split_seed=0).train_source()
    for batch in source.batches(0, torch.arange(N), seed=0):
        batch[0].zero_()
    assert torch.equal(x, X)


@pytest.mark.parametrize("in_memory", [True, False])
def test_batches_arrive_on_the_device(in_memory: bool) -> None:
    source = FederatedDataModule(TensorDataset(X, Y), num_clients=2, split_seed=0, in_memory=in_memory).train_source()
    source = source.to(torch.device("meta"))
    batch = next(source.batches(0, torch.arange(4), seed=0))
    assert [part.device.type for part in batch] == ["meta", "meta"]
    assert [part.shape for part in batch] == [(4, 2, 3), (4,)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("in_memory", [True, False])
def test_cuda_batches_equal_cpu_batches(in_memory: bool) -> None:
    data = FederatedDataModule(TensorDataset(X, Y), num_clients=2, batch_size=4, split_seed=0, in_memory=in_memory)
    order = torch.randperm(int(data.split.sizes[1]))
    here = list(data.train_source().batches(1, order, seed=0))
    there = list(data.train_source().to("cuda").batches(1, order, seed=0))
    assert all(part.is_cuda for batch in there for part in batch)
    assert same([[part.cpu() for part in batch] for batch in there], here)


@pytest.mark.parametrize("tensors", [(X, Y), TENSORS], ids=["tuple", "dict"])
def test_eval_batches_are_consecutive_slices(tensors: Any) -> None:
    batches = EvalBatches(tensors, batch_size=10)
    read = list(batches)
    assert len(batches) == len(read) == 5
    key = "x" if isinstance(tensors, dict) else 0
    assert [len(batch[key]) for batch in read] == [10, 10, 10, 10, 1]
    assert torch.equal(torch.cat([batch[key] for batch in read]), X)
    assert batches.to("meta") is batches
    assert next(iter(batches))[key].device.type == "meta"


class Closes:
    """A source that notes how it is told to close."""

    sizes, batch_size, reads_are_seeded = np.array([3]), 3, True

    def __init__(self) -> None:
        self.told: list[bool] = []

    def close(self, unsure: bool = False) -> None:
        self.told.append(unsure)


def test_a_source_over_another_tells_it_to_close() -> None:
    inner: Any = Closes()
    source = WrappedSource(inner)
    source.close(unsure=True)
    source.close()
    assert inner.told == [True, False]
