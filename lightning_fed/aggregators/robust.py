"""Robust means of the updates, for cohorts in which some clients may send arbitrary updates."""

from typing import Any

from torch import Tensor

from lightning_fed.aggregators.base import Aggregator
from lightning_fed.core.updates import Need, ReducedUpdate
from lightning_fed.errors import expect_count, expect_number
from lightning_fed.functional.robust import (
    bulyan,
    check_bulyan,
    check_krum,
    check_trim,
    coordinate_median,
    geometric_median,
    krum_select,
    trimmed_mean,
)

__all__ = ["Bulyan", "CoordinateMedian", "GeometricMedian", "Krum", "MultiKrum", "RobustMean", "TrimmedMean"]


class RobustMean(Aggregator):
    """The base of rules that use a robust mean of the updates instead of their mean.

    Such a rule holds all updates of the cohort, shape (n, d). Its options are checked against the cohort's size before
    training and in each round.
    """

    needs = Need.UPDATES


class CoordinateMedian(RobustMean):
    """Adds the median of each coordinate: w <- w + η_g median_i δ_i (Yin et al., ICML 2018, Definition 1).

    For an even number of clients it is the mean of the middle two values. It tolerates corrupted clients
    if they are fewer than half. The weights p_i are not used. For one or two clients it is FedAvg, weighted uniformly.
    """

    weighs_updates = False
    mask_refusal = "each coordinate of a median already follows the majority of the clients"

    def server_step(self, update: ReducedUpdate) -> Tensor:
        return coordinate_median(update.updates)


class TrimmedMean(RobustMean):
    """Adds the mean of each coordinate without its k smallest and k largest values (Yin et al., ICML 2018).

    Definition 2 there. It tolerates up to k corrupted clients in a round. The weights p_i are not used. k = 0 is FedAvg
    with uniform weighting; the largest possible k is the median.

    Args:
        trim: k, the values cut at each end of each coordinate; every round needs more than 2k clients.
        **kwargs: Options of every aggregator.
    """

    weighs_updates = False
    mask_refusal = "in each coordinate it already leaves out the clients far from the others"

    def __init__(self, trim: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.trim = expect_count("--aggregator.trim", trim, least=0)
        self.min_clients = 2 * trim + 1

    def check_cohort(self, num_clients: int) -> None:
        check_trim(num_clients, self.trim)

    def server_step(self, update: ReducedUpdate) -> Tensor:
        return trimmed_mean(update.updates, self.trim)


class MultiKrum(RobustMean):
    """Adds the plain mean of the m updates with the lowest Krum scores (Blanchard et al., NeurIPS 2017).

    A client's score is the sum of squared distances to its n - f - 2 nearest others. Clients are scored once; equal
    scores go by the updates' values, see ``value_order``. It tolerates up to f corrupted clients if n >= 2f + 3. The
    weights p_i are not used. m = n is FedAvg with uniform weighting.

    Args:
        num_corrupted: f, the corrupted clients to tolerate, at least 0.
        num_selected: m, at least 1; by default n - f.
        **kwargs: Options of every aggregator.
    """

    weighs_updates = False
    mask_refusal = "it leaves out whole clients, whose votes would still count in the mask"

    def __init__(self, num_corrupted: int = 1, num_selected: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_corrupted = expect_count("--aggregator.num_corrupted", num_corrupted, least=0)
        self.num_selected = expect_count("--aggregator.num_selected", num_selected, optional=True)
        self.min_clients = max(2 * num_corrupted + 3, num_selected or 1)

    def check_cohort(self, num_clients: int) -> None:
        check_krum(num_clients, self.num_corrupted, self.num_selected)

    def server_step(self, update: ReducedUpdate) -> Tensor:
        count = update.num_clients - self.num_corrupted if self.num_selected is None else self.num_selected
        rows = krum_select(update.updates, self.num_corrupted, count)
        return update.updates[rows.sort().values].mean(dim=0)  # summed in the order of client ids


class Krum(MultiKrum):
    """Adds the one update with the lowest Krum score (Blanchard et al., NeurIPS 2017, section 4).

    That is ``MultiKrum`` with m = 1.

    Args:
        num_corrupted: f, the corrupted clients to tolerate, at least 0.
        **kwargs: Options of every aggregator.
    """

    mask_refusal = "it adds the update of one client, but a mask would count the votes of the others"

    def __init__(self, num_corrupted: int = 1, **kwargs: Any) -> None:
        super().__init__(num_corrupted, 1, **kwargs)


class Bulyan(RobustMean):
    """Picks n - 2f clients by Krum, then adds each coordinate's mean near their median; see ``bulyan``.

    El Mhamdi, Guerraoui, Rouault, "The Hidden Vulnerability of Distributed Learning in Byzantium", ICML 2018, section
    4. It also tolerates corrupted clients that pass Krum because they differ in few coordinates only. The weights p_i
    are not used. f = 0 is FedAvg with uniform weighting.

    Args:
        num_corrupted: f, the corrupted clients to tolerate, at least 0; every round needs n >= 4f + 3 clients.
        **kwargs: Options of every aggregator.
    """

    weighs_updates = False
    mask_refusal = "it already leaves out clients, and in each coordinate those far from the median"

    def __init__(self, num_corrupted: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_corrupted = expect_count("--aggregator.num_corrupted", num_corrupted, least=0)
        self.min_clients = 4 * num_corrupted + 3

    def check_cohort(self, num_clients: int) -> None:
        check_bulyan(num_clients, self.num_corrupted)

    def server_step(self, update: ReducedUpdate) -> Tensor:
        return bulyan(update.updates, self.num_corrupted)


class GeometricMedian(RobustMean):
    """Adds the point with the least sum of distances, min_z Σ p_i ‖z - δ_i‖ (Pillutla, Kakade, Harchaoui, 2019).

    "Robust Aggregation for Federated Learning", by the smoothed Weiszfeld algorithm; see ``geometric_median``. It
    tolerates corrupted clients with less than half of the total weight. For one client it is FedAvg.

    Args:
        iterations: Maximum number of iterations in a round; each reads the cohort's updates twice.
        tolerance: Stops when the point moves by at most this share of its distance to the updates (harmonic mean).
        smoothing: ν, above 0: smaller distances count as ν.
        **kwargs: Options of every aggregator.
    """

    mask_refusal = "it gives clients far from the others little weight, but their votes would count in full"

    def __init__(self, iterations: int = 100, tolerance: float = 1e-6, smoothing: float = 1e-6, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.iterations = expect_count("--aggregator.iterations", iterations)
        self.tolerance = expect_number("--aggregator.tolerance", tolerance, least=0)
        self.smoothing = expect_number("--aggregator.smoothing", smoothing, above=0)

    def server_step(self, update: ReducedUpdate) -> Tensor:
        return geometric_median(update.updates, update.weights, self.iterations, self.tolerance, self.smoothing)
