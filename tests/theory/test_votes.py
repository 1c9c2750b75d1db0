"""What a vote of signs leaves of signal and of noise: the closed forms of docs/theory.md against the package's mask."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from docs.votes_figure import beside, boundary, mixture, signal
from lightning_fed.core.updates import Client, ReducedUpdate
from lightning_fed.masks import SignAgreement

DOCS = Path(__file__).parents[2] / "docs"
COORDINATES = 200_000


def masked(n: int, tau: float, snr: float, share: float, binary: bool) -> tuple[float, ...]:
    """Length, progress, cos and drift that the package's mask leaves of Gaussian updates, in float64."""
    rng = np.random.default_rng(n)
    signal = np.where(np.arange(COORDINATES) < share * COORDINATES, snr, 0.0)
    mean, signs = np.zeros(COORDINATES), np.zeros(COORDINATES)
    for _ in range(n):
        delta = signal + rng.normal(size=COORDINATES)
        mean += delta / n
        signs += np.sign(delta)
    update = ReducedUpdate(1, tuple(Client(i, 1, 1) for i in range(n)), sign_sum=torch.tensor(signs))
    left = SignAgreement(tau, binary).compute(update).numpy() * mean
    length, progress = np.linalg.norm(left) / np.linalg.norm(mean), left @ mean / (mean @ mean)
    return length, progress, progress / length, left[signal > 0].mean() / snr


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize(
    ("n", "tau", "snr", "share"),
    [(2, 0.4, 1.0, 1.0), (5, 0.4, 0.5, 0.5), (10, 0.2, 0.3, 1.0), (10, 0.4, 1.5, 0.2), (50, 0.4, 0.2, 0.3)],
)
def test_closed_forms_are_what_the_mask_leaves(n: int, tau: float, snr: float, share: float, binary: bool) -> None:
    np.testing.assert_allclose(masked(n, tau, snr, share, binary), mixture(n, tau, snr, share, binary), atol=0.012)


@pytest.mark.parametrize("binary", [False, True])
def test_a_weak_push_keeps_of_its_drift_what_noise_keeps_of_its_progress(binary: bool) -> None:
    for n, tau in ((2, 0.4), (10, 0.4), (100, 0.2)):
        weak, noise = mixture(n, tau, 1e-4, binary=binary), mixture(n, tau, binary=binary)
        assert weak.drift == pytest.approx(noise.progress, abs=1e-6)
        assert noise.drift == pytest.approx(noise.progress)


def test_the_table_of_the_page() -> None:
    lines = re.findall(r"^\| (\d+) \| (0\.\d) \| (soft|binary) \| (.+) \|$", (DOCS / "theory.md").read_text(), re.M)
    assert len(lines) == 10
    for n, tau, form, cells in lines:
        size, threshold, binary = int(n), float(tau), form == "binary"
        noise, edge = mixture(size, threshold, binary=binary), boundary(size, threshold, binary)
        exact = [noise.length, noise.progress, noise.cos, edge, edge * size**0.5, 1 / noise.length]
        for word, number in zip(cells.split(" | "), exact, strict=True):
            assert abs(float(word) - number) <= 0.5001 * 10 ** -len(word.partition(".")[2]), (
                n,
                tau,
                form,
                word,
                number,
            )


def test_a_soft_mask_pays_from_about_one_and_a_half_standard_deviations_of_the_mean_on() -> None:
    edges = [
        boundary(n, tau) * n**0.5
        for n in (2, 5, 10, 20, 50, 100)
        for tau in (0.1, 0.2, 0.4, 0.6)
        if mixture(n, tau).length < 0.999
    ]
    assert min(edges) > 1.0
    assert max(edges) < 1.56


@pytest.mark.parametrize(
    ("votes", "binary", "slowed"), [(1, False, 0.1), (2, False, 0.2), (2, True, 0.0), (4, False, 1.0)]
)
def test_what_few_clients_push_for_is_delayed_or_stopped(votes: int, binary: bool, slowed: float) -> None:
    """A coordinate that k of 10 clients pull to 1, by (1 - w) / 10 a round, and that the others leave alone."""
    clients, reached = tuple(Client(i, 1, 1) for i in range(10)), [0.0]
    for at in range(100):
        delta = torch.tensor([0.1 * (1 - reached[-1])] * votes + [0.0] * (10 - votes), dtype=torch.float64)
        update = ReducedUpdate(at + 1, clients, mean=delta.mean()[None], sign_sum=delta.sign().sum()[None])
        reached.append(reached[-1] + float(SignAgreement(0.4, binary).compute(update) * update.mean))
    rounds = np.arange(101)
    np.testing.assert_allclose(reached, 1 - (1 - 0.1 * votes / 10 * slowed) ** rounds, atol=1e-12)
    assert (np.array(reached) <= 1 - (1 - 0.1 * votes / 10) ** (rounds * slowed) + 1e-12).all()


def test_what_runs_left_of_the_length_is_said() -> None:
    with (DOCS / "results/gma/why_length/table.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["statistic"] == "rounds 1-60"]
    found = {of: [float(row["mean"]) for row in rows if row["clients"] == of] for of in ("10 of 10", "10 of 100")}
    text = " ".join((DOCS / "theory.md").read_text().split())
    assert f"leaves {min(found['10 of 100']):.2f} to {max(found['10 of 100']):.2f} of it" in text
    assert f"leaves {min(found['10 of 10']):.2f} to {max(found['10 of 10']):.2f}, less than noise" in text
    assert max(found["10 of 10"]) < mixture(10, 0.4).length


def test_runs_are_where_the_closed_form_says() -> None:
    """As predicted in configs/studies/mask/votes.yaml, with the numbers of the page."""
    off = {tuple(cell.values()): np.abs(np.subtract(left[:3], runs[:3])).max() for cell, left, runs in beside()}
    assert len(off) == 24
    assert max(off.values()) < 0.1
    steps = max(off, key=lambda cell: off[cell])
    text = " ".join((DOCS / "theory.md").read_text().split())
    assert f"and {off[steps]:.3f} at most ({steps[1]} clients, {steps[0]} steps)" in text
    assert f"within {max(error for cell, error in off.items() if cell[0] == '1'):.3f} with one local step" in text


def test_what_was_predicted_of_progress_and_failed() -> None:
    progress = {(cell["local steps"], cell["clients"], cell["threshold"]): runs.progress for cell, _, runs in beside()}
    one = [progress["1", n, "0.4"] for n in ("5", "10", "30", "100")]
    text = " ".join((DOCS / "theory.md").read_text().split())
    assert "it is {:.2f}, {:.2f}, {:.2f} and {:.2f} for 5, 10, 30 and 100 clients".format(*one) in text
    for n, tau in {key[1:] for key in progress} - {("5", "0.2")}:  # where the mask is 1
        assert progress["1", n, tau] < progress["4", n, tau] > progress["16", n, tau]


def test_the_signal_of_clients_is_above_where_a_mask_pays() -> None:
    said = {cell["clients"]: signal(float(cell["cosine"])) for cell, *_ in beside() if cell["local steps"] == "4"}
    text = " ".join((DOCS / "results/mask/when.md").read_text().split())
    assert f"above both, {said['10']:.2f} with 10 clients and {said['100']:.2f} with 100" in text
    assert all(said[n] > boundary(int(n), 0.4) for n in ("10", "100"))
