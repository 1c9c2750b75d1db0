"""FedGA: gradients at points where the clients' agree more; and its forms of one step, GradAlign and linear scaling."""

from typing import Any, Literal

import numpy as np
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import ASGD, SGD, Adafactor

from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.updates import ByRound, Client, ReducedUpdate, StartGradient, Update, at_round
from lightning_fed.errors import FederatedError, expect_choice, expect_number
from lightning_fed.functional.clients import difference, linear_scaling_shift

__all__ = ["FedGA", "GradAlign", "LinearScaling"]


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


class GradAlign(FedGA):
    """Takes one step at a displaced point: w_i = w - η ∇f_i(w - β v_i), v_i = g̅ - g_i, f_i over all of a client's data.

    Dandi, Barba, Jaggi, "Implicit Gradient Alignment in Distributed and Federated Learning", AAAI 2022, Algorithm 1:
    FedGA with one local step on the full batch. β = 0 is FedSGD, bit for bit.

    Args:
        beta: β, at least 0, in units of the learning rate; the paper found 1.5 to 2.5 best (appendix B.2). Or β from
            each of several rounds on.
        over: The samples of f_i: all of a client's ``data``, or one ``batch`` of it for both v_i and the step (the
            paper's figure 2 has batches of 1,000 of 5,000 samples).
    """

    def __init__(self, beta: ByRound = 1.5, over: Literal["data", "batch"] = "data") -> None:
        super().__init__(beta, form="step")
        self.over = expect_choice("--client.over", over, ("data", "batch"), of=type(self).__name__)

    def check(self, trainer: TrainerLike) -> None:
        """Refuses more than one local step, and batches smaller than a client's data unless ``over`` is ``batch``."""
        super().check(trainer)
        name = type(self).__name__
        if trainer.work is not None:
            raise FederatedError(
                f"Expected {name} with one local step at one learning rate for all, got {type(trainer.work).__name__}: "
                "leave out `--trainer.participation.work`, or use FedGA."
            )
        if 1 not in (trainer.local_epochs, trainer.local_steps):
            got = f"{trainer.local_steps} steps" if trainer.local_steps else f"{trainer.local_epochs} epochs"
            raise FederatedError(
                f"Expected {name} with one local step, got {got}: set `--trainer.local_steps 1`, or use FedGA."
            )
        largest, batch = int(np.max(trainer.client_sizes)), trainer.batch_size
        on_batch = self.over == "batch" and trainer.local_steps == 1
        if batch < largest and not on_batch or trainer.accumulate_grad_batches > 1:
            other = "set `--client.over batch` and `--trainer.local_steps 1`, " if type(self) is GradAlign else ""
            raise FederatedError(
                f"Expected {name} to take its step on all of a client's data, got batches of {batch} for a client of "
                f"{largest} samples: set `--data.batch_size {largest}` and leave out "
                f"`--trainer.accumulate_grad_batches`, {other}or use FedGA."
            )


class LinearScaling(GradAlign):
    """Sums the clients' steps, with alignment: w <- w - η Σ_i ∇f_i(w - (η/2) Σ_{j≠i} ∇f_j(w)).

    To second order this is n steps of size η, one on each client. Dandi, Barba, Jaggi, "Implicit Gradient Alignment in
    Distributed and Federated Learning", AAAI 2022, appendix A.2. The update is n times the local step without the
    displacement, so the uniform mean is the sum of the steps. With one client it is its plain step. η is the learning
    rate of the clients' SGD.
    """

    def __init__(self) -> None:
        super().__init__(beta=0.0)

    def check(self, trainer: TrainerLike) -> None:
        """Refuses weights by samples, clipping, and optimizers whose first step is not learning rate times gradient."""
        super().check(trainer)
        if trainer.by_samples:
            raise FederatedError(
                f"Expected `--aggregator.weighting uniform` for {type(self).__name__}, which sums the clients' steps, "
                "got weights that depend on their samples."
            )
        if trainer.gradient_clip_val:
            raise FederatedError(
                f"Expected no gradient clipping with {type(self).__name__}, whose displacements would not be clipped, "
                f"got {trainer.gradient_clip_val}: leave out `--trainer.gradient_clip_val`, or use GradAlign."
            )
        optimizer = trainer.optimizers[0]
        groups = optimizer.param_groups
        plain = isinstance(optimizer, SGD) and not any(group["nesterov"] for group in groups)
        if not plain or len({float(group["lr"]) for group in groups}) > 1:
            raise FederatedError(
                f"Expected SGD with one learning rate and without Nesterov's momentum as the clients' optimizer for "
                f"{type(self).__name__}, got {type(optimizer).__name__}: change `--model.optimizer`."
            )

    def shift(self, trainer: TrainerLike, client: Client, out: Tensor) -> Tensor:
        start, lr = trainer.start_gradients, float(trainer.optimizers[0].param_groups[0]["lr"])
        return linear_scaling_shift(start.mean, start.gradient, len(start.clients), lr, out)

    def on_client_end(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        update.delta.mul_(len(trainer.start_gradients.clients))

    def on_before_server_step(self, trainer: TrainerLike, pl_module: LightningModule, update: ReducedUpdate) -> None:
        """Sums only the steps of clients that entered, if others diverged or took no step."""
        share = update.num_clients / len(trainer.start_gradients.clients)
        if share < 1:
            for total in (update.mean, update.normalized_mean, update.sum, update.abs_sum, update.updates):
                total.mul_(share)
            update.variance.mul_(share**2)
