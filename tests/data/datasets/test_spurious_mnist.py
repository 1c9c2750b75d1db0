"""MNIST beside inputs that mislead, counted input by input on small images of known labels."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_fed.data import SpuriousMNIST
from lightning_fed.errors import FederatedError

MEAN, STD = 0.1307, 0.3081
TRAIN = torch.arange(400).remainder(10), torch.arange(200).remainder(10)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of one brightness each, the number of their row."""

    def read(self: SpuriousMNIST, train: bool) -> tuple[Tensor, Tensor]:
        labels = TRAIN[0 if train else 1]
        rows = torch.arange(len(labels)).remainder(256).to(torch.uint8)
        return rows.reshape(-1, 1, 1, 1).expand(-1, 1, 28, 28).clone(), labels

    monkeypatch.setattr(SpuriousMNIST, "read", read)


def made(**options: Any) -> SpuriousMNIST:
    return SpuriousMNIST(**{"num_clients": 4, "samples_per_client": 50, "split_seed": 3, **options})


def of_client(data: SpuriousMNIST, client: int) -> tuple[Tensor, Tensor]:
    source = data.train_source()
    size = int(source.sizes[client])
    [(x, y)] = source.batches(client, torch.arange(size), 0, size)
    return x, y


def sets_of(data: SpuriousMNIST) -> dict[str, tuple[Tensor, Tensor]]:
    loaders: Any = data.test_dataloader()
    parts = {name: list(zip(*loader, strict=True)) for name, loader in loaders.items()}
    return {name: (torch.cat(x), torch.cat(y)) for name, (x, y) in parts.items()}


@pytest.mark.parametrize("shared", [1, 2, 4])
def test_a_sample_lights_the_input_of_its_class_in_its_clients_block_alone(shared: int) -> None:
    data = made(shared=shared, strength=6.0)
    for client in range(4):
        x, y = of_client(data, client)
        assert x.shape == (50, 784 + 10 * 4 // shared)
        expected = np.zeros((50, 4 // shared, 10), dtype=np.float32)
        expected[np.arange(50), client // shared, y.numpy()] = 6
        np.testing.assert_array_equal(x[:, 784:].numpy(), expected.reshape(50, -1))


def test_pixels_are_those_of_the_image_normalised_and_each_image_has_one_client() -> None:
    data = made(shared=2)
    seen = []
    for client in range(4):
        x, y = of_client(data, client)
        rows = (x[:, 0] * STD + MEAN).mul(255).round().long()
        torch.testing.assert_close(x[:, :784], ((rows / 255 - MEAN) / STD)[:, None].expand(-1, 784))
        assert all((row - label) % 2 == 0 or row >= 144 for row, label in zip(rows.tolist(), y.tolist(), strict=True))
        seen += list(zip(rows.tolist(), y.tolist(), strict=True))
    # 400 rows of which brightness tells the row modulo 256, and with the label's last digit the row itself.
    assert len(set(seen)) == len(seen) == 200


def test_the_three_test_sets_say_nothing_something_wrong_and_the_truth() -> None:
    parts = sets_of(made(shared=2))
    assert set(parts) == {"none", "wrong", "own"}
    assert not parts["none"][0][:, 784:].any()
    for name, (x, y) in parts.items():
        assert torch.equal(y, TRAIN[1])
        if name == "none":
            continue
        lit = x[:, 784:].reshape(-1, 2, 10)
        assert (lit.flatten(1).count_nonzero(dim=1) == 1).all()
        says = lit.sum(1).argmax(1)
        assert bool((says == y).all()) is (name == "own")
        assert name == "own" or not (says == y).any()
        assert set(lit.sum(2).argmax(1).tolist()) == {0, 1}  # blocks at random
    assert (
        len(set((parts["wrong"][0][:, 784:].reshape(-1, 2, 10).sum(1).argmax(1) - TRAIN[1]).remainder(10).tolist()))
        == 9
    )


def test_decoys_light_one_input_of_each_other_block_that_tells_nothing() -> None:
    data = made(shared=1, decoys=True, samples_per_client=100)
    for client in range(4):
        x, y = of_client(data, client)
        lit = x[:, 784:].reshape(-1, 4, 10)
        assert (lit.count_nonzero(dim=2) == 1).all()
        places = lit.argmax(2)
        assert torch.equal(places[:, client], y)
        others = [block for block in range(4) if block != client]
        assert 0 < float((places[:, others] == y[:, None]).float().mean()) < 0.25  # a tenth by chance
    assert (sets_of(data)["none"][0][:, 784:].reshape(-1, 4, 10).count_nonzero(dim=2) == 1).all()


def test_noise_is_standard_normal_and_flips_hit_the_first_clients_alone() -> None:
    data = made(noise=200, flipped=0.5)
    clean = made()
    for client in range(4):
        (x, y), (pixels, truth) = of_client(data, client), of_client(clean, client)
        assert torch.equal(x[:, :784], pixels)
        assert torch.equal(y, 9 - truth if client < 2 else truth)
        noise = x[:, 784:]
        assert noise.shape == (50, 200)
        assert abs(float(noise.mean())) < 0.05
        assert abs(float(noise.std()) - 1) < 0.05
    [(x, y)] = sets_of(data).values() if isinstance(data.test_dataloader(), dict) else [_joined(data)]
    assert x.shape == (200, 984)
    assert torch.equal(y, TRAIN[1])


def test_shuffled_labels_are_those_of_the_first_clients_in_another_order() -> None:
    data, clean = made(shuffled=0.5, shared=1), made(shared=1)
    for client in range(4):
        (x, y), (there, truth) = of_client(data, client), of_client(clean, client)
        assert torch.equal(x, there), "signatures too, which know the truth"
        assert torch.equal(y, truth) == (client >= 2)
        assert torch.equal(y.sort().values, truth.sort().values)
        assert (y == truth).float().mean() < 0.4 or client >= 2
    flipped = made(shuffled=0.25, flipped=0.25)
    assert torch.equal(of_client(flipped, 0)[1].sort().values, (9 - of_client(clean, 0)[1]).sort().values)


def _joined(data: SpuriousMNIST) -> tuple[Tensor, Tensor]:
    loader: Any = data.test_dataloader()
    x, y = zip(*loader, strict=True)
    return torch.cat(x), torch.cat(y)


def test_all_of_it_depends_on_the_seed_and_the_options_alone() -> None:
    options = {"shared": 2, "decoys": True, "noise": 3}
    same, other = made(**options), made(**options, split_seed=4)
    x, y = of_client(made(**options), 1)
    assert torch.equal(x, of_client(same, 1)[0])
    assert torch.equal(y, of_client(same, 1)[1])
    assert not torch.equal(x, of_client(other, 1)[0])
    changes: tuple[dict[str, Any], ...] = (
        {}, {"shared": 1}, {"shared": 2}, {"noise": 1}, {"flipped": 0.25}, {"shuffled": 0.25},
    )  # fmt: skip
    hashes = {made(**change).split_hash for change in changes}
    assert len(hashes) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared": 3}, r"^Expected `--data.shared` to be null or a divisor of the 4 clients, got 3\.$"),
        ({"shared": 0}, r"^Expected `--data.shared` to be null or a divisor of the 4 clients, got 0\.$"),
        ({"samples_per_client": 15_001}, r"^Expected `--data.samples_per_client` to be .*15,?000.*got 15,?001"),
        ({"flipped": 1.5}, r"^Expected `--data.flipped` to be .*got 1\.5"),
        ({"shuffled": -0.5}, r"^Expected `--data.shuffled` to be .*got -0\.5"),
        ({"noise": -1}, r"^Expected `--data.noise` to be .*got -1"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        made(**options)
