"""Every mistake with a feature skew ends in one sentence that names the option."""

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from lightning_fed.data import BinaryColors, ClassColors, ClientColors, ClientRotation, FeatureSkew
from lightning_fed.errors import FederatedError
from tests.data.skews.parts import X, Y, module, prepared


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: BinaryColors(flip_rate_high=1.2), "Expected `--data.skew.flip_rate_high` to be in [0, 1], got 1.2."),
        (lambda: BinaryColors(label_noise=-0.1), "Expected `--data.skew.label_noise` to be in [0, 1], got -0.1."),
        (lambda: BinaryColors(test_flip_rate=0.15), "not to lie between them, since no client has it, got 0.1"),
        (lambda: BinaryColors(flip_rate_low=0.3), "Expected `--data.skew.flip_rate_low` to be at most"),
        (lambda: ClassColors(colors_per_class=0), "Expected `--data.skew.colors_per_class` to be an integer"),
        (lambda: ClassColors(test_colors=0), "Expected `--data.skew.test_colors` to be an integer of at"),
        (lambda: ClientRotation(0.0), "Expected `--data.skew.max_angle` to be above 0 and at most 180, got 0.0."),
    ],
)  # fmt: skip
def test_options_out_of_range(make: Any, sentence: str) -> None:
    with pytest.raises(FederatedError) as error:
        make()
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("skew", "dataset", "sentence"),
    [
        (ClientColors(), TensorDataset(X, X), "Expected class labels for `--data.skew ClientColors`, whose colors"),
        (ClassColors(), TensorDataset(X[:, 0], Y), "Expected grey images of shape (1, H, W) for `--data.skew Class"
         "Colors`, got inputs of shape (7, 9)"),
        (BinaryColors(), TensorDataset(X.expand(-1, 3, -1, -1), Y), "got inputs of shape (3, 7, 9): choose grey data"),
        (ClientColors(), TensorDataset((X * 255).to(torch.uint8), Y), "Expected grey images of shape (1, H, W)"),
        (ClientColors(), TensorDataset(X * 4 - 1, Y), "to be in [0, 1] before normalisation, got"),
        (ClientRotation(), TensorDataset(X.flatten(1), Y), "Expected images of shape (C, H, W) for `--data.skew "
         "ClientRotation`, got inputs of shape (63,)"),
        (ClientRotation(), TensorDataset(X * 4 - 1, Y), "Expected the brightness of images for `--data.skew ClientRota"
         "tion` to be in [0, 1] before normalisation, got -"),
        (ClientRotation(), TensorDataset((X * 4 - 1).expand(-1, 3, -1, -1), Y), "give `Datasets` the `mean` and `std`"),
        (ClientRotation(), TensorDataset(X * torch.nan, Y), "in [0, 1] before normalisation, got nan"),
    ],
)  # fmt: skip
def test_data_that_a_skew_is_not_made_for(skew: FeatureSkew, dataset: Dataset[Any], sentence: str) -> None:
    with pytest.raises(FederatedError) as error:
        module(skew, dataset).setup()
    assert sentence in str(error.value)


def test_batches_that_cannot_be_skewed() -> None:
    data = module(ClientColors(), predict_dataset=TensorDataset(X))
    with pytest.raises(FederatedError, match="Expected labels beside the inputs .* change `--data.predict_dataset`"):
        next(iter(data.predict_dataloader()))
    skew = prepared(ClientRotation())
    assert skew.apply(X[:2], 0, torch.empty(2, 0)).shape == (2, 1, 7, 9)
    with pytest.raises(FederatedError, match="Expected batches of `--data.skew` to be .* got dict"):
        skew.apply({"words": "x"}, 0, torch.empty(2, 0))
