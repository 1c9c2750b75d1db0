"""Adaptive federated optimization: server rules that scale each coordinate by its own history."""

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from lightning_fed.aggregators.base import StatefulAggregator
from lightning_fed.core.updates import ByRound, ReducedUpdate
from lightning_fed.errors import expect_choice, expect_number
from lightning_fed.functional.server import fedadagrad_step, fedadam_step, fedyogi_step

__all__ = ["AdaptiveAggregator", "FedAdagrad", "FedAdam", "FedYogi", "MomentAggregator"]

_Rule = Callable[[Tensor, Tensor, Tensor, float, float, float], tuple[Tensor, Tensor, Tensor]]


class AdaptiveAggregator(StatefulAggregator):
    """The base of the adaptive rules: ε and the initial value of v.

    Args:
        epsilon: ε above 0 (the paper's τ), added to √v outside the root. A smaller ε adapts more.
        initial_v: The initial v: ``epsilon_squared`` (Reddi et al.) or ``zero``.
        lr: η_g, the server learning rate, above 0. A coordinate that moves in the first round moves by about η_g.
        **kwargs: Options of every aggregator.
    """

    def __init__(
        self,
        epsilon: float = 1e-3,
        initial_v: Literal["epsilon_squared", "zero"] = "epsilon_squared",
        lr: ByRound = 0.01,
        **kwargs: Any,
    ) -> None:
        super().__init__(lr=lr, **kwargs)
        self.epsilon = expect_number("--aggregator.epsilon", epsilon, above=0)
        self.initial_v = expect_choice("--aggregator.initial_v", initial_v, ("epsilon_squared", "zero"))

    def recall_v(self, like: Tensor) -> Tensor:
        """Returns v, shape (d,)."""
        return self.recall("v", like, self.epsilon**2 if self.initial_v == "epsilon_squared" else 0.0)


class FedAdagrad(AdaptiveAggregator):
    """Divides by the root of all squared updates: v <- v + Δ²; w <- w + η_g Δ / (√v + ε).

    Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2 with β1 = 0. The step for
    a given Δ only shrinks from round to round. With v starting at zero and η_g = ε the rule tends to FedAvg as ε grows.
    """

    def server_step(self, update: ReducedUpdate) -> Tensor:
        step, self.vectors["v"] = fedadagrad_step(update.mean, self.recall_v(update.mean), self.epsilon)
        return step


class MomentAggregator(AdaptiveAggregator):
    """The base of FedAdam and FedYogi: the moving averages z of Δ and v of Δ².

    Args:
        beta1: β1 in [0, 1), the decay of z: the larger, the more slowly z forgets.
        beta2: β2 in [0, 1), the decay of v.
        **kwargs: Options of every adaptive aggregator.
    """

    def __init__(self, beta1: float = 0.9, beta2: float = 0.99, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.beta1 = expect_number("--aggregator.beta1", beta1, least=0, below=1)
        self.beta2 = expect_number("--aggregator.beta2", beta2, least=0, below=1)

    def apply_rule(self, rule: _Rule, update: ReducedUpdate) -> Tensor:
        """Advances z and v by a rule and returns its step, shape (d,)."""
        z, v = self.recall("z", update.mean), self.recall_v(update.mean)
        step, z, v = rule(update.mean, z, v, self.beta1, self.beta2, self.epsilon)
        self.vectors = {"z": z, "v": v}
        return step


class FedAdam(MomentAggregator):
    """Adam on the server: z <- β1 z + (1 - β1) Δ; v <- β2 v + (1 - β2) Δ²; w <- w + η_g z / (√v + ε).

    Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2: no bias correction, ε outside the root.
    With β1 = 0, v starting at zero and η_g = ε the rule tends to FedAvg as ε grows.
    """

    def server_step(self, update: ReducedUpdate) -> Tensor:
        return self.apply_rule(fedadam_step, update)


class FedYogi(MomentAggregator):
    """Yogi on the server: FedAdam with v <- v - (1 - β2) Δ² sign(v - Δ²).

    Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2. v forgets large updates more slowly than in
    Adam, so steps do not grow suddenly.
    """

    def server_step(self, update: ReducedUpdate) -> Tensor:
        return self.apply_rule(fedyogi_step, update)
