"""A skewed sample is the same in every batch, order and path; what the model and evaluation see."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fed.client_algorithms import SCAFFOLD
from lightning_fed.data import Datasets, FederatedDataModule, TensorSource
from lightning_fed.data.batch_sources import EvalBatches, LoaderSource
from lightning_fed.data.partitioners import IID, ExactClasses, Shards
from lightning_fed.data.skews import (
    BinaryColors,
    ClassColors,
    ClientColors,
    ClientRotation,
    DataFacts,
    FeatureSkew,
    SkewedSource,
)
from lightning_fed.models import MLP, ImageClassifier
from tests.data.skews.parts import CLASSES, DICTS, SKEWS, N, X, Y, by_row, equal, eval_parts, module
from tests.parts import OneByOne, Sent, federated_trainer


@pytest.mark.parametrize("skew", SKEWS, ids=lambda s: type(s).__name__)
def test_a_sample_looks_the_same_in_every_batch_order_and_path(skew: FeatureSkew) -> None:
    """Bit for bit; full-gradient passes are the case of ascending order and another batch size."""
    data = module(skew)
    assert type(data.train_source()) is SkewedSource
    expected = by_row(data, torch.Generator().manual_seed(0), None)
    for seed, size, other in ((1, 1, {}), (2, 5, {}), (3, 64, {"in_memory": False}), (4, 3, {"dataset": DICTS})):
        assert equal(by_row(module(skew, **other), torch.Generator().manual_seed(seed), size), expected), (size, other)
    source = data.train_source()
    rows = data.split.index[data.split.offsets[2] : data.split.offsets[3]].tolist()
    [(x, y)] = source.batches(2, torch.arange(len(rows)), 0, 1000)
    assert equal(list(zip(x, y, strict=True)), [expected[row] for row in rows])


@pytest.mark.parametrize("skew", SKEWS, ids=lambda s: type(s).__name__)
def test_schemes_are_on_the_device_before_the_first_batch(skew: FeatureSkew) -> None:
    data = module(skew, val_fraction=0.25)
    source, loaders = data.train_source().to("meta"), data.test_dataloader()
    for loader in loaders.values():
        loader.to("meta")
    with Sent() as sent:
        for client, size in enumerate(source.sizes):
            batches = list(source.batches(client, torch.arange(size), 0))
            assert {part.device.type for batch in batches for part in batch} == {"meta"}
        shown = [part for loader in loaders.values() for batch in loader for part in batch]
        assert {part.device.type for part in shown} == {"meta"}
    assert set(sent.sizes) <= set(source.sizes), "nothing is sent but the order of an epoch"


@pytest.mark.parametrize("skew", SKEWS, ids=lambda s: type(s).__name__)
def test_evaluation_is_the_same_for_any_batch_size_and_path(skew: FeatureSkew) -> None:
    made = []
    every: list[dict[str, Any]] = [
        {},
        {"eval_batch_size": 11},
        {"in_memory": False, "eval_batch_size": 50},
        {"dataset": DICTS},
    ]
    for options in every:
        data = module(skew, **{"val_fraction": 0.25, **options})
        loaders: Any = data.test_dataloader()
        predicted: Any = data.predict_dataloader()
        assert list(loaders) == list(predicted) == ["seen_schemes", "new_scheme"]
        made.append([*map(eval_parts, loaders.values()), eval_parts(data.val_dataloader())])
        assert all(torch.equal(*pair) for pair in zip(eval_parts(loaders["new_scheme"]), made[-1][1], strict=True))
    for other in made[1:]:
        assert all(torch.equal(a, b) for x, y in zip(made[0], other, strict=True) for a, b in zip(x, y, strict=True))
    seen, new, val = made[0]
    assert not torch.equal(seen[0], new[0])
    assert len(val[0]) == 30


@pytest.mark.parametrize("skew", SKEWS, ids=lambda s: type(s).__name__)
def test_the_seed_alone_decides(skew: FeatureSkew) -> None:
    def read(**options: Any) -> list[tuple[Tensor, Tensor]]:
        return by_row(module(skew, **options), torch.Generator().manual_seed(0), None)

    first = read()
    state: Any = random.getstate(), np.random.get_state(), torch.get_rng_state()
    assert equal(read(), first)
    assert random.getstate() == state[0]
    assert np.array_equal(np.random.get_state()[1], state[1][1])
    assert torch.equal(torch.get_rng_state(), state[2])
    assert not equal(read(split_seed=4), first)


@pytest.mark.parametrize("skew", SKEWS, ids=lambda s: type(s).__name__)
def test_the_data_are_neither_changed_nor_copied(skew: FeatureSkew) -> None:
    x, y = X.clone(), Y.clone()
    data = module(skew, TensorDataset(x, y))
    source = data.train_source()
    for batch in source.batches(0, torch.arange(30), 0):
        batch[0].zero_()
    for loader in dict(data.test_dataloader()).values():
        eval_parts(loader)
    assert torch.equal(x, X)
    assert torch.equal(y, Y)
    held = [v for part in (source, source._rows, source._rows._skew) for v in vars(part).values()]
    largest = max(value.numel() for value in held if isinstance(value, Tensor))
    assert largest < X.numel() / 20, "what is kept are numbers for each row, not images"


def test_pooled_training_data_keep_the_schemes_of_their_owners() -> None:
    for in_memory in (True, False):
        data = module(ClientColors(), num_clients=3, in_memory=in_memory, partitioner=Shards(2), batch_size=16)
        expected = {tuple(x.flatten().tolist()): int(y) for x, y in by_row(data, torch.Generator(), None)}
        pooled = [(x, y) for xs, ys in data.train_dataloader() for x, y in zip(xs, ys, strict=True)]
        assert {tuple(x.flatten().tolist()): int(y) for x, y in pooled} == expected
        assert len(pooled) == len(expected) == N


def test_held_out_samples_are_seen_as_their_owners_see_them() -> None:
    options: dict[str, Any] = {"num_clients": 6, "client_test_fraction": 0.25, "unseen_clients": 2}
    data = module(BinaryColors(), val_fraction=0.25, val_split="per_client", **options)
    loaders: Any = data.test_dataloader()
    assert isinstance(loaders, dict)
    assert list(loaders) == ["seen_schemes", "new_scheme", "clients", "unseen"]
    assert len(data.train_source().sizes) == 4
    skew = BinaryColors().prepare(6, 3, DataFacts(X[0], CLASSES))
    parts = ((data.val_dataloader(), data.division.val), (loaders["clients"], data.division.clients))
    for loader, part in (*parts, (loaders["unseen"], data.division.unseen)):
        rows = torch.from_numpy(part.rows)
        expected = skew.apply([X[rows], Y[rows]], torch.from_numpy(part.owners), skew.draws("train", N)[rows])
        assert all(torch.equal(*pair) for pair in zip(eval_parts(loader), expected, strict=True))
    assert set(data.division.unseen.owners) == {4, 5}


def test_a_central_validation_set_is_seen_by_the_targets_that_were_given() -> None:
    """A class is held by one client each: its samples are validated in no other client's colours."""
    options: dict[str, Any] = {"val_fraction": 0.25, "num_clients": CLASSES, "partitioner": ExactClasses(1)}
    told = module(ClientColors(), **options)
    silent = module(ClientColors(), OneByOne(N, DICTS.sample), targets=Y, **options)  # does not tell its targets
    for one, other in zip(eval_parts(told.val_dataloader()), eval_parts(silent.val_dataloader()), strict=True):
        assert torch.equal(one, other)
    colors = [{hue(x) for x, label in by_row(silent, torch.Generator(), None) if label == c} for c in range(CLASSES)]
    inputs, labels = eval_parts(silent.val_dataloader())
    assert all(hue(x) in colors[int(label)] for x, label in zip(inputs, labels, strict=True))


def hue(image: Tensor) -> tuple[float, ...]:
    """The colour of the brightest pixel, to three digits."""
    flat = image.flatten(1)
    color = flat[:, flat.sum(0).argmax()]
    return tuple((color / color.max() * 1000).round().tolist())


def test_several_test_sets_and_a_prediction_set() -> None:
    whole, part = TensorDataset(X, Y), TensorDataset(X[:9], Y[:9])
    data = module(ClientColors(), test_dataset={"near": whole, "far": part}, predict_dataset=part)
    loaders: Any = data.test_dataloader()
    assert isinstance(loaders, dict)
    assert list(loaders) == ["near/seen_schemes", "near/new_scheme", "far/seen_schemes", "far/new_scheme"]
    predicted = eval_parts(data.predict_dataloader())[0]
    assert torch.equal(predicted, eval_parts(loaders["far/new_scheme"])[0])


def test_what_the_model_is_told() -> None:
    names = tuple("abcdef")

    class Named(FederatedDataModule):
        def load_datasets(self) -> Any:
            return Datasets(TensorDataset((X - 0.5) / 0.5, Y), class_names=names, mean=(0.5,), std=(0.5,))

    def facts(skew: FeatureSkew | None) -> tuple[Any, ...]:
        data = Named(None, num_clients=4, skew=skew, split_seed=0)
        counts = data.class_counts()
        assert counts is not None
        assert counts.shape == (4, data.num_classes)
        assert data.split_summary()["classes_per_client_mean"] == (counts > 0).sum(1).mean()
        return data.input_shape, data.num_classes, data.class_names, data.mean, data.std

    assert facts(None) == facts(ClientRotation()) == ((1, 7, 9), 6, names, (0.5,), (0.5,))
    colored = ((3, 7, 9), 6, names, (0.5,) * 3, (0.5,) * 3)
    assert facts(ClientColors()) == facts(ClassColors()) == colored
    assert facts(BinaryColors()) == ((3, 7, 9), 2, ("a to c", "d to f"), (0.5,) * 3, (0.5,) * 3)


@pytest.mark.parametrize("skew", SKEWS, ids=lambda s: type(s).__name__)
def test_the_split_does_not_depend_on_the_skew(skew: FeatureSkew) -> None:
    for partitioner in (Shards(1), Shards(2), IID()):
        plain, skewed = (module(each, partitioner=partitioner).split for each in (None, skew))
        assert np.array_equal(skewed.index, plain.index)
        assert np.array_equal(skewed.offsets, plain.offsets)


def test_without_a_skew_batches_come_straight_from_the_data() -> None:
    assert isinstance(module(None).train_source(), TensorSource)
    assert isinstance(module(None, in_memory=False).train_source(), LoaderSource)
    assert isinstance(module(None).test_dataloader(), EvalBatches)


def test_one_skew_serves_two_data_modules() -> None:
    skew = ClientColors()
    first = by_row(module(skew), torch.Generator(), None)
    data = module(skew, num_clients=7, split_seed=9, partitioner=IID())
    by_row(data, torch.Generator(), None)
    assert equal(by_row(module(skew), torch.Generator(), None), first)
    assert not hasattr(skew, "table")


@pytest.mark.parametrize("skew", SKEWS, ids=lambda s: type(s).__name__)
def test_a_skew_that_has_shown_samples_can_be_prepared_again(skew: FeatureSkew) -> None:
    facts, draws = DataFacts(X[0], CLASSES), torch.zeros(N, skew.num_draws)
    used = skew.prepare(4, 0, facts)
    used.apply([X, Y], 2, draws)
    again, new = used.prepare(4, 1, facts), skew.prepare(4, 1, facts)
    for scheme in (2, 3, torch.arange(N) % 5):
        assert all(map(torch.equal, again.apply([X, Y], scheme, draws), new.apply([X, Y], scheme, draws)))


@pytest.mark.parametrize("skew", SKEWS, ids=lambda s: type(s).__name__)
def test_batches_arrive_on_the_device(skew: FeatureSkew) -> None:
    for in_memory in (True, False):
        data = module(skew, in_memory=in_memory)
        source = data.train_source().to("meta")
        shape = data.input_shape
        assert shape is not None
        loaders: Any = data.test_dataloader()
        evaluated = next(iter(loaders["new_scheme"].to("meta")))
        for batch in (next(source.batches(0, torch.arange(5), 0)), evaluated):
            assert [part.device.type for part in batch] == ["meta", "meta"]
            assert batch[0].shape[1:] == shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("skew", SKEWS, ids=lambda s: type(s).__name__)
def test_cuda_batches_equal_cpu_batches(skew: FeatureSkew) -> None:
    data, order = module(skew), torch.randperm(30)
    for here, there in zip(
        data.train_source().batches(1, order, 0), data.train_source().to("cuda").batches(1, order, 0), strict=True
    ):
        assert torch.allclose(there[0].cpu(), here[0], atol=0 if skew.needs_labels else 1e-5)
        assert torch.equal(there[1].cpu(), here[1])


class Watcher(ImageClassifier):
    """Remembers every image that a step sees, by whether weights are trained on it."""

    def __init__(self, in_features: int) -> None:
        super().__init__(MLP(in_features, hidden=(), num_classes=CLASSES), num_classes=CLASSES)
        self.kept = SimpleNamespace(train=set(), test=set())  # a full gradient leaves no trace in a dict

    @property
    def seen(self) -> dict[str, set[bytes]]:
        return vars(self.kept)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen["train"].update(image.numpy().tobytes() for image in batch[0])
        return super().training_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen["test"].update(image.numpy().tobytes() for image in batch[0])
        super().test_step(batch, batch_idx, dataloader_idx)


@pytest.mark.parametrize("skew", [ClientColors(), ClassColors()], ids=lambda s: type(s).__name__)
def test_local_steps_full_gradients_and_evaluation_see_the_same_images(skew: FeatureSkew, tmp_path: Path) -> None:
    """SCAFFOLD's option I passes over all data of a client, here in batches of another size than the local ones."""
    data = module(skew, val_fraction=0.1)
    model = Watcher(3 * 63)
    options: dict[str, Any] = {"max_rounds": 2, "local_steps": 2, "clients_per_round": 1.0}
    options |= {"full_gradient_batch_size": 11, "check_test_every_n_rounds": 1}
    trainer = federated_trainer(tmp_path, SCAFFOLD(option="I"), **options)
    trainer.fit(model, data)
    samples = by_row(module(skew, val_fraction=0.1), torch.Generator(), None)
    assert model.seen["train"] == {x.numpy().tobytes() for x, _ in samples}
    loaders: Any = data.test_dataloader()
    assert model.seen["test"] == {x.numpy().tobytes() for name in loaders for x in eval_parts(loaders[name])[0]}
    assert {"val/acc", "test/acc/seen_schemes", "test/acc/new_scheme"} <= trainer.callback_metrics.keys()
