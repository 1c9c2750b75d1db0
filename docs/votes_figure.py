"""What a vote of n signs leaves of a mean update of signal and noise: closed forms, and a picture of them.

    python docs/votes_figure.py

reads the tables of docs/results/gma/why_length/ and mask/votes/, and writes docs/images/votes.png. The clients' updates
of a coordinate are δ_i = μ + σ ε_i with ε_i ~ N(0, 1), independent over clients and coordinates; s = μ/σ is a client's
signal-to-noise. Δ = (1/n) Σ δ_i, and m is the mask of GMA (Tenison et al., TMLR 2023, eq. 3). Lengths are in
units of σ.
"""

import csv
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr
from scipy.stats import binom, norm

matplotlib.use("Agg")
from matplotlib.pyplot import rc_context, subplots
from pictures import save

__all__ = ["Left", "beside", "boundary", "main", "mixture", "moments", "signal"]

DOCS = Path(__file__).resolve().parent
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
GREY = "#808080"  # reads on white and on black
COLOURS = {0.1: "#3b8bd6", 0.2: "#009e73", 0.4: "#e69f00", 0.6: "#d55e00"}
PIXELS = 784 / 2784  # of the inputs of mask/votes; the others are noise
SIZES = (10, 20, 40, 60, 80, 100)  # τ n is an even number of votes but at 10, so that curves have no teeth


class Left(NamedTuple):
    """What a mask leaves of the mean update."""

    length: float
    progress: float
    cos: float
    drift: float


def moments(n: int, tau: float, snr: float, binary: bool = False) -> tuple[float, float, float, float]:
    """Returns E[m Δ], E[m Δ²], E[m² Δ²] and E[Δ²] of a coordinate, from the number k of positive signs.

    k ~ Binomial(n, Φ(s)). Given k, Δ is the mean of k draws of N(s, 1) above 0 and n - k below, so with the mean a and
    variance v of the former, a = s + φ(s)/Φ(s), v = 1 - (a - s) a, and those of the latter, b and u,
    E[Δ | k] = (k a + (n - k) b) / n and E[Δ² | k] = E[Δ | k]² + (k v + (n - k) u) / n². m depends on k alone.
    """
    k = np.arange(n + 1)
    up, down = (np.exp(norm.logpdf(snr) - log_ndtr(side * snr)) for side in (1, -1))
    a, b = snr + up, snr - down
    first = (k * a + (n - k) * b) / n
    second = first**2 + (k * (1 - up * a) + (n - k) * (1 + down * b)) / n**2
    agreement = abs(2 * k - n) / n
    mask = np.where(agreement >= tau - 1e-12, 1.0, 0.0 if binary else agreement)
    chances = binom.pmf(k, n, norm.cdf(snr))
    return chances @ (mask * first), chances @ (mask * second), chances @ (mask**2 * second), snr**2 + 1 / n


def mixture(n: int, tau: float, snr: float = 0.0, share: float = 1.0, binary: bool = False) -> Left:
    """What the mask leaves where a share of the coordinates has a signal-to-noise of s, and the others noise alone.

    length = ‖m ⊙ Δ‖ / ‖Δ‖, progress = ⟨m ⊙ Δ, Δ⟩ / ‖Δ‖², cos = progress / length; drift = E[m Δ] / μ where there is
    signal, at s = 0 its limit. Squares are expectations, as over many coordinates.
    """
    signal, noise = moments(n, tau, snr, binary), moments(n, tau, 0.0, binary)
    half, whole, unmasked = (
        share * one + (1 - share) * other for one, other in zip(signal[1:], noise[1:], strict=True)
    )
    # At μ = 0 the derivative of the clients' density by μ is n Δ times it, so that of E[m Δ] is n E[m Δ²].
    drift = signal[0] / snr if snr else n * noise[1]
    return Left(np.sqrt(whole / unmasked), half / unmasked, half / np.sqrt(whole * unmasked), drift)


def boundary(n: int, tau: float, binary: bool = False) -> float:
    """Returns the s above which more is left of the signal than of the length of noise: drift(s) = length(0)."""
    noise = mixture(n, tau, binary=binary).length
    return brentq(lambda snr: mixture(n, tau, snr, binary=binary).drift - noise, 1e-3, 3.0)


def signal(cosine: float, share: float = PIXELS) -> float:
    """Returns s from the mean cosine c of two clients' updates, c = q s² / (1 + q s²), with a share q of signal."""
    return float(np.sqrt(cosine / (1 - cosine) / share))


def beside() -> list[tuple[dict[str, str], Left, Left]]:
    """Returns axes and cosine of each cell of the study mask/votes, what the closed form leaves, and what runs left."""
    cells: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    axes = ("local steps", "clients", "threshold")
    for row in csv.DictReader((DOCS / "results/mask/votes/table.csv").open()):
        cells[tuple(row[axis] for axis in axes)][row["metric"]] = float(row["mean"])
    found = []
    for cell, means in cells.items():
        left = mixture(int(cell[1]), float(cell[2]), signal(means["update/cosine"]), PIXELS)
        measured = [means[f"agreement/{name}"] for name in ("through", "progress", "cos")]
        named = dict(zip(axes, cell, strict=True), cosine=str(means["update/cosine"]))
        found.append((named, left, Left(*measured, drift=np.nan)))
    return found


def lengths() -> list[float]:
    """Returns what was left of the length with 10 clients of two classes each and τ = 0.4, by setting."""
    rows = csv.DictReader((DOCS / "results/gma/why_length/table.csv").open())
    return [float(row["mean"]) for row in rows if row["statistic"] == "rounds 1-60"]


def draw(alone: Any, drift: Any, pays: Any, runs: Any) -> None:
    """Draws what is left of noise and of a signal, where a mask pays, and runs beside the closed form."""
    for tau, colour in COLOURS.items():
        alone.plot(SIZES, [mixture(n, tau).length for n in SIZES], color=colour, label=f"τ = {tau}")
        pays.plot(SIZES, [boundary(n, tau) for n in SIZES], color=colour)
    measured = lengths()
    alone.scatter([10] * len(measured), measured, s=14, color=COLOURS[0.4], edgecolors=GREY, zorder=3, label="runs")
    alone.set(title="length left of noise", xlabel="clients n", ylim=(0, 1.3))
    at = np.linspace(0, 1.5, 60)
    for n, style in ((10, "-"), (100, "--")):
        for tau in (0.2, 0.4):
            left = [mixture(n, tau, snr).drift for snr in at]
            drift.plot(at, left, style, color=COLOURS[tau], label=f"n = {n}, τ = {tau}")
    drift.set(title="drift left of a signal", xlabel="a client's signal-to-noise s", ylim=(0, 1.03))
    pays.plot(SIZES, [1.4 / n**0.5 for n in SIZES], ":", color=GREY, label="1.4 / √n")
    clients = [(int(cell["clients"]), signal(float(cell["cosine"]))) for cell, *_ in beside()]
    pays.scatter(*zip(*clients, strict=True), s=14, color=GREY, label="clients of mask/votes")
    pays.set(title="a mask pays above the line", xlabel="clients n", ylabel="s", ylim=(0, 1.3))
    for name, marker in (("length", "o"), ("progress", "^"), ("cos", "s")):
        pairs = [(getattr(left, name), getattr(measured, name)) for _, left, measured in beside()]
        runs.scatter(*zip(*pairs, strict=True), s=14, marker=marker, label=name)
    runs.plot([0.75, 1], [0.75, 1], color=GREY, linewidth=0.8)
    runs.set(title="runs beside the closed form", xlabel="by the clients' cosine", ylabel="measured")
    for axis, corner, columns in (
        (alone, "upper right", 3),
        (drift, "lower right", 1),
        (pays, "upper right", 1),
        (runs, "upper left", 1),
    ):
        axis.grid(color=GREY, alpha=0.25)
        axis.legend(fontsize=7, framealpha=0, loc=corner, ncols=columns)


def main() -> None:
    """Writes the picture."""
    ink: dict[Any, Any] = dict.fromkeys(INKED, GREY)
    with rc_context({**ink, "axes.titlecolor": GREY, "axes.titlesize": 10, "legend.labelcolor": GREY}):
        figure, axes = subplots(2, 2, figsize=(7.5, 5.4), layout="constrained")
        draw(*axes.flat)
        save(figure, DOCS / "images" / "votes.png", dpi=110, transparent=True)


if __name__ == "__main__":
    main()
