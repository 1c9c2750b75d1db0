"""FedGA: gradients computed at points where the clients' gradients agree more."""

from typing import Any, Literal

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import ASGD, Adafactor

from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.updates import ByRound, Client, StartGradient, Update, at_round
from lightning_fed.errors import expect_choice, expect_number
from lightning_fed.functional.local import difference

__all__ = ["FedGA"]


class FedGA(ClientAlgorithm):
    """Displaces each client's start by -β v_i, v_i = g̅ - g_i, then trains as usual.

    g_i = ∇f_i(w) over the client's full data and g̅ = Σ p_i g_i with the aggregator's weights are exchanged before
    training: a second communication round. To first order this adds to the loss a multiple of the variance of the
    clients' gradients. Dandi, Barba, Jaggi, "Implicit Gradient Alignment in Distributed and Federated Learning",
    AAAI 2022, Algorithm 2 (``start``) and Algorithm 3 (``step``). As Σ p_i v_i = 0, nothing is undone at the end.
    β = 0 is plain local training, bit for bit.

    Args:
        beta: β, at least 0, in units of the learning rate; or β from each of several rounds on, such as
            ``{1: 0.1, 50: 0.01}``. The paper found 1.5 to 2.5 best for similar clients and 0.025 to 0.05 for
            different ones.
        form: ``start`` displaces the client once; ``step`` computes each gradient at w_i - β v_i and steps from w_i.
            They agree for every optimizer that uses only gradients. If the optimizer reads the weights, as with weight
            decay, ``step`` is always used, so that it reads w_i without displacement.
        measure_from: Whether the update is measured from the ``displaced`` start, or from the ``global`` model as in
            Algorithm 2. The mean is the same, but with ``global`` masks and robust means see displacements too. The
            form ``step`` displaces no start.
    """

    stacks = True
    displaces = True

    def __init__(
        self,
        beta: ByRound = 0.05,
        form: Literal["start", "step"] = "start",
        measure_from: Literal["displaced", "global"] = "displaced",
    ) -> None:
        name = type(self).__name__
        self.beta = expect_number("--client.beta", beta, least=0, of=name, by_round=True)
        self.form = expect_choice("--client.form", form, ("start", "step"), of=name)
        self.measure_from = expect_choice("--client.measure_from", measure_from, ("displaced", "global"), of=name)

    def start_gradients(self, round: int) -> StartGradient:
        return "cohort"

    def beta_at(self, round: int) -> float:
        """Returns β of a round; 0 before the first round that ``beta`` names."""
        return at_round(self.beta, round)

    def shift(self, trainer: TrainerLike, client: Client, out: Tensor) -> Tensor:
        """Computes β v_i, shape (d,)."""
        start = trainer.start_gradients
        return difference(start.mean, start.gradient, out).mul_(self.beta_at(client.round))

    def on_client_start(self, trainer: TrainerLike, pl_module: LightningModule, client: Client) -> None:
        shift = self.shift(trainer, client, self.scratch("shift", trainer.weights))
        self._global = None if self.form == "step" or _reads_weights(trainer) else trainer.origin
        if self._global is None:
            trainer.displacement = shift
            return
        trainer.vector.data.sub_(shift)
        trainer.origin = self.scratch("start", trainer.vector.data).copy_(trainer.vector.data)

    def on_client_end(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        if self.measure_from == "displaced" or self.form == "step":
            return
        if self._global is None:  # the start was not displaced, because the optimizer reads the weights
            update.delta.sub_(self.scratch("shift", trainer.weights))
        else:  # not `origin`: a server rule may have moved it further
            update.delta.add_(self.scratch("start", trainer.vector.data)).sub_(self._global)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self.__dict__.pop("_global", None)


def _reads_weights(trainer: TrainerLike) -> bool:
    """Returns whether the client's optimizer may read the weights; one that is not torch's may, as LARS does."""
    optimizer = trainer.optimizers[0]
    stock = type(optimizer).__module__.startswith("torch.optim") and not isinstance(optimizer, (ASGD, Adafactor))
    return not stock or any(float(group.get("weight_decay", 0)) != 0 for group in optimizer.param_groups)
