"""GradAlign and linear scaling with alignment: forms of FedGA with one step on all of a client's data."""

from typing import Literal

import numpy as np
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import SGD

from lightning_fed.client_algorithms.fedga import FedGA
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.updates import ByRound, Client, ReducedUpdate, Update
from lightning_fed.errors import FederatedError, expect_choice
from lightning_fed.functional.local import linear_scaling_shift

__all__ = ["GradAlign", "LinearScaling"]


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
