"""Measures how well scores separate members of a training set from samples that a model has never seen.

Yeom et al., "Privacy Risk in Machine Learning", CSF 2018 (the loss as a score); Tenison et al., "Gradient Masked
Averaging for Federated Learning", TMLR 2023, appendix F (a logistic regression on logits); Carlini et al., "Membership
Inference Attacks From First Principles", S&P 2022 (log-odds of the label, true positives at few false positives);
Kairouz, Oh, Viswanath, "The Composition Theorem for Differential Privacy", ICML 2015 (the most that any test can do).
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_fed.lab.report.plots import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "attack_figures", "best_threshold", "bootstrap_interval", "client_means", "confidences", "logistic_scores",
    "most_true", "roc_curve", "roc_figure",
]  # fmt: skip

_COVERAGE = 0.95


def confidences(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns log(p / (1 - p)) of the probability p of each sample's own label, shape (n,).

    It falls where the loss, -log p, rises, and still differs between samples with tiny losses. Logits have the shape
    (n, C) with C >= 2, labels are int64.
    """
    own = labels[:, None]
    return logits.gather(1, own)[:, 0] - logits.scatter(1, own, -torch.inf).logsumexp(dim=1)


def client_means(scores: Tensor, owners: Tensor) -> Tensor:
    """Returns the mean score of each client that owns a sample, in ascending order of id; float64."""
    counts = torch.bincount(owners)
    return (torch.bincount(owners, scores) / counts)[counts > 0]


def most_true(false: Tensor, epsilon: float, delta: float) -> Tensor:
    """Returns the largest true positive rate of any test, for false positive rates, of what has (ε, δ)-privacy.

    TPR <= min(1, e^ε FPR + δ, 1 - e^(-ε) (1 - δ - FPR)), so that the balanced accuracy is at most (e^ε + δ) /
    (e^ε + 1); with ε = δ = 0 it is guessing.
    """
    factor = math.exp(min(epsilon, 700.0))
    return torch.minimum(factor * false + delta, 1 - (1 - delta - false) / factor).clamp(max=1)


def logistic_scores(members: Tensor, others: Tensor, logits: Tensor) -> Tensor:
    """Fits a logistic regression on logits, each standardised, and returns its log-odds of membership.

    It is fitted on logits of members and as many others, shape (m, C), and returned for ``logits``, shape (n, C): shape
    (n,), float64; a value above 0 means member.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    is_member = torch.cat([torch.ones(len(members)), torch.zeros(len(others))])
    attacker = make_pipeline(StandardScaler(), LogisticRegression(max_iter=5000))
    attacker.fit(torch.cat([members, others]).double().numpy(), is_member.numpy())
    return torch.from_numpy(attacker.decision_function(logits.double().numpy()))


def roc_curve(members: Tensor, others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the rates of the rules "member if the score is at least t", for each distinct score t, largest first.

    From scores of shape (m,) and (n,) returns false positive rates, true positive rates and t, each of shape (K,), the
    rates in float64.
    """
    from sklearn import metrics

    is_member = torch.cat([torch.ones(len(members)), torch.zeros(len(others))])
    found = metrics.roc_curve(is_member.numpy(), torch.cat([members, others]).numpy(), drop_intermediate=False)
    false, true, thresholds = (torch.from_numpy(each[1:]) for each in found)  # the first is above all scores
    return false, true, thresholds


def best_threshold(members: Tensor, others: Tensor) -> float:
    """Returns the score t with the best balanced accuracy of the rule "member if the score is at least t"."""
    false, true, thresholds = roc_curve(members, others)
    return float(thresholds[(true - false).argmax()])


def attack_figures(members: Tensor, others: Tensor, threshold: float, levels: Sequence[float]) -> Tensor:
    """Computes how well scores separate members from non-members; members should have larger scores.

    Args:
        members: Scores of members, shape (m,).
        others: Scores of non-members, shape (n,).
        threshold: The score from which on a sample is called a member, for the accuracy.
        levels: False positive rates in [0, 1].

    Returns:
        Shape (2 + levels,), float64: balanced accuracy; area under the ROC curve, where a tie counts one half; and for
        each level the largest true positive rate of a threshold with at most that false positive rate.
    """
    accuracy = ((members >= threshold).double().mean() + (others < threshold).double().mean()) / 2
    rates, counts = roc_curve(members, others)[:2], (len(others), len(members))
    # Counts are exact, so a level of 0.29 allows 29 of 100; with rates a rounding error could exclude them.
    false, true = (pad((rate * count).round(), (1, 0)) for rate, count in zip(rates, counts, strict=True))
    area = torch.trapezoid(true, false) / len(others)
    found = [true[false <= level * len(others) + 1e-9].max() for level in levels]
    return torch.cat([accuracy[None], torch.stack([area, *found]) / len(members)])


def bootstrap_interval(
    members: Tensor, others: Tensor, threshold: float, levels: Sequence[float], repeats: int, generator: torch.Generator
) -> Tensor:
    """Computes 95 % percentile intervals of ``attack_figures`` from ``repeats`` bootstrap resamples.

    Members and others are resampled separately; the threshold stays fixed.

    Returns:
        Lower and upper ends, shape (2, 2 + levels), float64.
    """
    figures = []
    for _ in range(repeats):
        inside, outside = (
            scores[torch.randint(len(scores), (len(scores),), generator=generator)] for scores in (members, others)
        )
        figures.append(attack_figures(inside, outside, threshold, levels))
    ends = torch.tensor([(1 - _COVERAGE) / 2, (1 + _COVERAGE) / 2], dtype=torch.float64)
    return torch.stack(figures).quantile(ends, dim=0)


def roc_figure(attacks: Mapping[str, tuple[Tensor, Tensor, float]], privacy: tuple[float, float] | None) -> "Figure":
    """Draws the ROC curve of each attack, as steps on logarithmic axes, next to guessing and what (ε, δ) allows."""
    from matplotlib.figure import Figure

    least = 1 / max(len(scores) for attack in attacks.values() for scores in attack[:2])
    figure = Figure(figsize=(5.0, 4.6), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([least, 1], [least, 1], "--", color="0.5", linewidth=1.0, label="guessing")
    for colour, (name, (members, others, _)) in zip(COLOURS, attacks.items(), strict=False):
        false, true, _ = roc_curve(members, others)
        # A logarithmic axis has no 0: points without a false positive are drawn at the left edge.
        axes.step(false.clamp(min=least / 2), true, where="post", color=colour, linewidth=1.6, label=name)
    if privacy is not None:
        false = torch.logspace(-6, 0, 200, dtype=torch.float64)
        axes.plot(false, most_true(false, *privacy), ":", color="0.3", label="most that ε allows, clients")
    axes.set(
        xscale="log", yscale="log", xlim=(least / 2, 1), ylim=(least / 2, 1.05),
        xlabel="false positive rate", ylabel="true positive rate",
    )  # fmt: skip
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    return figure
