"""Augmentation: crops and flips are right and evenly drawn, the same from every source, and only in training."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jsonargparse
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import Need
from lightning_fed.aggregators import FedAvg
from lightning_fed.data import Augmentation, AugmentedSource, CropFlip, FederatedDataModule
from lightning_fed.data.batch_sources import map_inputs
from lightning_fed.errors import FederatedError
from tests.parts import OneByOne, Sent, federated_trainer, same

N = 48
IMAGES = torch.rand(N, 2, 6, 7, generator=torch.Generator().manual_seed(0)) + 0.1  # no zeros: they are the border's
LABELS = torch.arange(N) % 4


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def origin(image: Tensor, changed: Tensor, padding: int) -> tuple[int, int, bool]:
    """Finds the one crop and flip that makes an image of another, by trying all."""
    channels, height, width = image.shape
    padded = torch.zeros(channels, height + 2 * padding, width + 2 * padding)
    padded[:, padding : padding + height, padding : padding + width] = image
    found = []
    for top in range(2 * padding + 1):
        for left in range(2 * padding + 1):
            window = padded[:, top : top + height, left : left + width]
            for flip, tried in ((False, window), (True, window.flip(2))):
                found += [(top, left, flip)] if torch.equal(tried, changed) else []
    [place] = found
    return place


def test_every_result_is_a_crop_and_flip_of_its_own_image() -> None:
    changed = CropFlip(padding=2)(IMAGES, stream())
    places = {origin(image, result, 2) for image, result in zip(IMAGES, changed, strict=True)}
    assert len(places) > 20
    assert {flip for _, _, flip in places} == {False, True}


def test_places_are_drawn_evenly() -> None:
    """χ² over 25 places of 5,000 images, then the share of flips; each is exceeded with probability 0.1 %."""
    marked = torch.arange(1.0, 43).reshape(1, 1, 6, 7).expand(5000, 1, 6, 7)
    corners = CropFlip(padding=2)(marked, stream(1))[:, 0, 2:4, 3]  # two pixels that lie within the image at any place
    places, counts = corners.unique(dim=0, return_counts=True)
    # A flip mirrors the middle column onto itself, so that a place is known but for the flip.
    assert len(places) == 25
    assert ((counts - 200.0) ** 2 / 200).sum() < 51.2  # 24 degrees of freedom, 0.1 %
    rising = CropFlip(padding=0)(marked, stream(1))[:, 0, 0, 0] == 1
    assert abs(int(rising.sum()) - 2500) < 117  # 3.3 standard deviations of a binomial: 0.1 %


def test_parts_can_be_switched_off() -> None:
    assert torch.equal(CropFlip(padding=0, flip=False)(IMAGES, stream()), IMAGES)
    flipped = CropFlip(padding=0)(IMAGES, stream())
    places = {origin(image, result, 0) for image, result in zip(IMAGES, flipped, strict=True)}
    assert places == {(0, 0, False), (0, 0, True)}
    cropped = CropFlip(padding=1, flip=False)(IMAGES, stream())
    assert not any(origin(image, result, 1)[2] for image, result in zip(IMAGES, cropped, strict=True))


def test_three_numbers_an_image_go_to_the_device() -> None:
    with Sent() as sent:
        changed = CropFlip()(IMAGES.to("meta"), stream())
    assert (changed.device.type, changed.shape) == ("meta", IMAGES.shape)
    assert sent.sizes == [IMAGES.numel(), 3 * N]  # the images themselves were sent within the block


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_same_on_cuda() -> None:
    assert torch.equal(CropFlip()(IMAGES.cuda(), stream()).cpu(), CropFlip()(IMAGES, stream()))


DICTS = OneByOne(N, lambda row: {"image": IMAGES[row], "label": LABELS[row]})


def source(dataset: Any = None, in_memory: bool = True, **options: Any) -> AugmentedSource:
    options = {"num_clients": 3, "batch_size": 5, "split_seed": 1, "augmentation": CropFlip(2), **options}
    dataset = dataset or TensorDataset(IMAGES, LABELS)
    made = FederatedDataModule(dataset, in_memory=in_memory, **options).train_source()
    assert isinstance(made, AugmentedSource)
    return made


def read(made: AugmentedSource, client: int = 1, seed: int = 5) -> list[Tensor]:
    order = torch.arange(N // 3).flip(0)
    return [batch["image"] if isinstance(batch, dict) else batch[0] for batch in made.batches(client, order, seed)]


def test_every_source_gives_the_same() -> None:
    expected = read(source())
    assert [len(batch) for batch in expected] == [5, 5, 5, 1]
    assert same(read(source(in_memory=False)), expected)
    assert same(read(source(in_memory=False, num_workers=1)), expected)
    assert same(read(source(DICTS)), expected)
    plain = source().unaugmented.batches(1, torch.arange(16).flip(0), 5)
    for batch, changed in zip(plain, expected, strict=True):
        assert all(origin(*pair, 2) for pair in zip(batch[0], changed, strict=True))


def test_draws_depend_on_the_seed_alone() -> None:
    made = source()
    first = read(made)
    read(made, client=0, seed=7)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert same(read(made), first)
    assert torch.equal(torch.get_rng_state(), state)
    other = read(made, seed=6)
    assert not torch.equal(first[0], other[0])


def test_each_batch_has_draws_of_its_own() -> None:
    """One image over and over: two batches are the same only if their draws are."""
    alike = source(TensorDataset(IMAGES[:1].expand(N, -1, -1, -1), LABELS))
    batches = read(alike)
    assert not torch.equal(batches[0], batches[1])
    assert not same(read(alike, seed=6)[:3], batches[:3])


class Counting(Augmentation):
    """Keeps what it is given and changes it visibly."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.drawn: list[float] = []

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        self.sizes.append(len(inputs))
        self.drawn.append(float(torch.rand((), generator=generator)))
        return inputs + 100


class Seeing(LightningModule):
    """Records the smallest input of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(84, 4)
        self.kept = SimpleNamespace(train=[], val=[], test=[])  # a full gradient leaves no trace in a dict

    @property
    def seen(self) -> dict[str, list[tuple[float, bool]]]:
        return vars(self.kept)

    def _loss(self, batch: Any, part: str) -> Tensor:
        self.seen[part].append((float(batch[0].min()), self.training))
        return nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def training_step(self, batch: Any) -> Tensor:
        return self._loss(batch, "train")

    def validation_step(self, batch: Any) -> None:
        self._loss(batch, "val")

    def test_step(self, batch: Any) -> None:
        self._loss(batch, "test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class AsksForGradients(FedAvg):
    """FedAvg that has every client's full gradient taken."""

    needs = Need.MEAN | Need.GRADIENT_MEAN
    gradient_at = "start"


def test_only_local_steps_are_augmented(tmp_path: Path) -> None:
    def fit() -> tuple[Seeing, Counting]:
        model, augmentation = Seeing(), Counting()
        images = TensorDataset(IMAGES, LABELS)
        options: Any = {"num_clients": 3, "batch_size": 4, "val_fraction": 0.25, "split_seed": 0}
        data = FederatedDataModule(images, test_dataset=images, augmentation=augmentation, **options)
        trainer = federated_trainer(tmp_path, AsksForGradients(), max_rounds=2, local_epochs=2)
        trainer.fit(model, datamodule=data)
        trainer.test(model, datamodule=data)
        return model, augmentation

    model, augmentation = fit()
    # 12 samples a client: 3 batches, in 2 epochs of 2 rounds of 3 clients, and as many full gradients less the epochs.
    assert augmentation.sizes == [4] * 36
    assert sum(low > 50 for low, _ in model.seen["train"]) == 36
    assert sum(low < 50 for low, _ in model.seen["train"]) == 18
    assert all(low < 50 for part in ("val", "test") for low, _ in model.seen[part])
    assert len(model.seen["test"]) > 0
    starts = augmentation.drawn[::3]
    assert len(set(starts)) == 12, "every client, epoch and round draws anew"
    assert fit()[1].drawn == augmentation.drawn


def test_pooled_training_data_are_augmented_too() -> None:
    data = FederatedDataModule(TensorDataset(IMAGES, LABELS), num_clients=3, augmentation=Counting(), split_seed=0)
    inputs, labels = next(iter(data.train_dataloader()))
    assert inputs.min() > 50
    assert labels.max() < 4


class Pair(NamedTuple):
    """A user's own kind of batch."""

    x: Tensor
    y: Tensor


def test_batches_keep_their_form() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    double = map_inputs(Pair(x, y), lambda inputs: 2 * inputs)
    assert type(double) is Pair
    assert (double.x.tolist(), double.y.tolist()) == ([2, 2], [0, 0])
    assert map_inputs(x, lambda inputs: 2 * inputs).tolist() == [2, 2]
    assert list(map_inputs({"x": x, "y": y}, lambda inputs: 2 * inputs)) == ["x", "y"]


def test_mistakes() -> None:
    with pytest.raises(FederatedError, match=r"`--data.augmentation.padding` to be an integer of at least 0, got -1"):
        CropFlip(padding=-1)
    with pytest.raises(FederatedError, match=r"shape \(B, C, H, W\) for `--data.augmentation` CropFlip, .* \(3, 4\)"):
        CropFlip()(torch.rand(3, 4), stream())


def test_from_the_command_line() -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(FederatedDataModule, "data")
    words = ["--data", "Digits", "--data.augmentation", "CropFlip", "--data.augmentation.padding", "1"]
    data = parser.instantiate_classes(parser.parse_args(words)).data
    assert (data.augmentation.padding, data.augmentation.flip) == (1, True)
    assert type(data.train_source()) is AugmentedSource
    plain = parser.instantiate_classes(parser.parse_args([*words[:2], "--data.augmentation", "null"])).data
    assert plain.augmentation is None
