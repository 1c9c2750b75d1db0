"""Pure functions on tensors and arrays: no trainer, no module, no input or output."""

from lightning_fed.functional.cgw import corrective_weights, weighted_gradients
from lightning_fed.functional.clients import ClientSummary, summarize_clients
from lightning_fed.functional.conflicts import (
    cagrad_weights,
    fedfv_weights,
    least_norm,
    mgda_weights,
    pcgrad_weights,
    ties_mean,
    without_conflicts,
)
from lightning_fed.functional.fairness import project_onto_simplex, qfedavg_weights, term_weights
from lightning_fed.functional.fednova import optimizer_distance, sgd_distance
from lightning_fed.functional.geometry import (
    GradientSpread,
    combine_rows,
    gradient_spread,
    gram_matrix,
    squared_distances,
    value_order,
)
from lightning_fed.functional.local import control_variate, difference, linear_scaling_shift
from lightning_fed.functional.losses import (
    calibration_margins,
    contrastive_loss,
    log_priors,
    not_true_divergence,
    restricted_factors,
)
from lightning_fed.functional.masks import (
    agreement,
    coin_flip_votes,
    gradient_and_mask,
    magnitude_agreement,
    magnitude_agreement_mask,
    sand_mask,
    sign_agreement_mask,
    vote_threshold,
)
from lightning_fed.functional.robust import (
    bulyan,
    coordinate_median,
    geometric_median,
    krum_scores,
    krum_select,
    trimmed_mean,
)
from lightning_fed.functional.server import (
    fedadagrad_step,
    fedadam_step,
    fedavgm_step,
    feddyn_step,
    fedexp_factor,
    fedyogi_step,
)

__all__ = [
    "ClientSummary",
    "GradientSpread",
    "agreement",
    "bulyan",
    "cagrad_weights",
    "calibration_margins",
    "coin_flip_votes",
    "combine_rows",
    "contrastive_loss",
    "control_variate",
    "coordinate_median",
    "corrective_weights",
    "difference",
    "fedadagrad_step",
    "fedadam_step",
    "fedavgm_step",
    "feddyn_step",
    "fedexp_factor",
    "fedfv_weights",
    "fedyogi_step",
    "geometric_median",
    "gradient_and_mask",
    "gradient_spread",
    "gram_matrix",
    "krum_scores",
    "krum_select",
    "least_norm",
    "linear_scaling_shift",
    "log_priors",
    "magnitude_agreement",
    "magnitude_agreement_mask",
    "mgda_weights",
    "not_true_divergence",
    "optimizer_distance",
    "pcgrad_weights",
    "project_onto_simplex",
    "qfedavg_weights",
    "restricted_factors",
    "sand_mask",
    "sgd_distance",
    "sign_agreement_mask",
    "squared_distances",
    "summarize_clients",
    "term_weights",
    "ties_mean",
    "trimmed_mean",
    "value_order",
    "vote_threshold",
    "weighted_gradients",
    "without_conflicts",
]
