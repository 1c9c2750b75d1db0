"""The centralised baseline against SGD written by hand on all data at once, in double precision."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_fed.cli import FederatedCLI
from lightning_fed.core.seeding import Purpose, generator_for

CONFIGS = Path(__file__).parents[2] / "configs"
ROUNDS, BATCH, RATE = 3, 10, 0.05


def batches(samples: int, seed: int, round: int) -> Iterator[Tensor]:
    """All samples in a random order, then in another one, without end."""
    shuffle = generator_for(seed, Purpose.SHUFFLE, round, 0)
    while True:
        yield from torch.randperm(samples, generator=shuffle).split(BATCH)


@pytest.mark.parametrize("steps", [70, 200])
def test_a_round_is_so_many_steps_on_the_pooled_data(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer than an epoch has, and more."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.chdir(tmp_path)
    layers = ("quickstart", "aggregator/gma", "client/scaffold", "baseline/centralised")
    options = ("data.val_fraction=0", "data.test_fraction=0", "trainer.check_test_every_n_rounds=null",
               "model.optimizer.momentum=0", "trainer.precision=64-true", "trainer.enable_progress_bar=false",
               f"trainer.local_steps={steps}", f"trainer.max_rounds={ROUNDS}")  # fmt: skip
    words = [*(f"--config={CONFIGS / layer}.yaml" for layer in layers), *(f"--{option}" for option in options)]
    cli = FederatedCLI(words, run=False, save_config_callback=None)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double()
    params = list(plain.parameters())
    with torch.no_grad():
        for ours, theirs in zip(params, cli.model.parameters(), strict=True):
            ours.copy_(theirs)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    inputs, targets = (torch.from_numpy(found) for found in load_digits(return_X_y=True))
    for round in range(1, ROUNDS + 1):
        for batch in islice(batches(len(inputs), cli.trainer.seed, round), steps):
            gradients = torch.autograd.grad(cross_entropy(plain(inputs[batch] / 16), targets[batch].long()), params)
            with torch.no_grad():
                for p, gradient in zip(params, gradients, strict=True):
                    p -= RATE * gradient
    for ours, theirs in zip(params, cli.model.parameters(), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-9, atol=1e-12)
    # 1,797 samples are 180 batches, the last one of 7.
    short = ROUNDS * 3 * (steps // 180)
    assert cli.trainer.totals["samples"] == ROUNDS * steps * BATCH - short
