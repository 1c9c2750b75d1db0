"""Pure functions on tensors and arrays: no trainer, no module, no input or output.

They are loaded on first use: ε is computed without torch.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_fed.functional.clients import *
    from lightning_fed.functional.conflicts import *
    from lightning_fed.functional.geometry import *
    from lightning_fed.functional.masks import *
    from lightning_fed.functional.robust import *
    from lightning_fed.functional.server import *

__all__ = [
    "ClientSummary", "GradientSpread", "agreement", "alignment_weights", "bulyan", "cagrad_weights",
    "calibration_margins", "coin_flip_votes", "combine_rows", "contrastive_loss", "control_variate",
    "coordinate_median", "corrective_weights", "difference", "fedadagrad_step", "fedadam_step", "fedavgm_step",
    "fedawa_offsets", "feddyn_step", "fedexp_factor", "fedfv_weights", "fedlws_shrinking", "fedyogi_step",
    "geometric_median", "gradient_and_mask", "gradient_spread", "gram_matrix", "krum_scores", "krum_select",
    "least_norm", "linear_scaling_shift", "log_priors", "magnitude_agreement", "magnitude_agreement_mask",
    "mgda_weights", "not_true_divergence", "of_length", "optimizer_distance", "pcgrad_weights", "project_onto_simplex",
    "restricted_factors", "sand_mask", "sgd_distance", "sign_agreement_mask", "squared_distances",
    "summarize_clients", "supported_deviations", "term_weights", "ties_mean", "trimmed_mean", "value_order",
    "vote_threshold", "weighted_gradients", "without_conflicts",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Loads a public name."""
    for module in [info.name for info in iter_modules(__path__)] if name in __all__ else ():
        if hasattr(loaded := import_module(f"{__name__}.{module}"), name):
            return getattr(loaded, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
