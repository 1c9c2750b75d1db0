"""Clients with a model of their own: kept from the server, or one gradient step away from the global one."""

from abc import abstractmethod
from copy import deepcopy
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fed.aggregators.fedavg import FedAvg
from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.core.hooks import TrainerLike
from lightning_fed.core.optimizer.flat import ELEMENTWISE, FlatOptimizer
from lightning_fed.core.updates import Client, Cohort, Update
from lightning_fed.errors import FederatedError, expect_choice, expect_count, expect_number

__all__ = ["APFL", "Ditto", "LocalOnly", "PFedMe", "PerFedAvg"]


class _OwnModel(ClientAlgorithm):
    """Keeps a vector of each client, shape (d,), from round to round; at first it is the model that the client gets."""

    stacks = True
    has_own_model = True

    @property
    def key(self) -> str:
        """What its records are kept under."""
        return type(self).__name__

    def check(self, trainer: Any) -> None:
        """Refuses an algorithm that displaces the weights of a client, among which its own model is not."""
        super().check(trainer)
        for other in trainer.callbacks:
            if getattr(other, "displaces", False):
                raise FederatedError(
                    f"Expected {self.key} without {type(other).__name__}, which displaces the weights where gradients "
                    "are taken, those of the client's own model too: leave one out of `--client`."
                )

    def on_client_start(self, trainer: TrainerLike, pl_module: LightningModule, client: Client) -> None:
        own = self.scratch("own", trainer.weights)
        if not trainer.client_states.recall(self.key, client.id, own):
            own.copy_(trainer.received)

    def on_client_entered(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        trainer.client_states.store(self.key, update.client.id, self.scratch("own", trainer.weights))

    def load_own(self, trainer: TrainerLike, client: int) -> None:
        shown = self.scratch("shown", trainer.weights)
        if trainer.client_states.recall(self.key, client, shown):
            trainer.vector.data.copy_(shown)


class LocalOnly(_OwnModel):
    """Leaves out the server: each client goes on from where its own training has got to, and δ_i = 0.

    The lower bound that personalised methods are compared with. No vector goes up or down, and the global model stays
    what it was at the start.
    """

    vectors_down = -1  # not even the model
    needs_local_buffers = True

    def check(self, trainer: Any) -> None:
        """Refuses other rules than FedAvg, and buffers that the server would average."""
        super().check(trainer)
        if type(trainer.aggregator) is not FedAvg:
            raise FederatedError(
                "Expected the aggregator FedAvg for LocalOnly, whose clients send nothing, got "
                f"{type(trainer.aggregator).__name__}: leave out `--aggregator`."
            )

    def on_client_start(self, trainer: TrainerLike, pl_module: LightningModule, client: Client) -> None:
        super().on_client_start(trainer, pl_module, client)
        trainer.vector.data.copy_(self.scratch("own", trainer.weights))
        trainer.origin = trainer.vector.data.clone()

    def on_client_end(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        update.delta.zero_()
        update.bytes_up = 0

    def on_client_entered(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        self.scratch("own", trainer.weights).copy_(trainer.vector.data)
        super().on_client_entered(trainer, pl_module, update)


class PFedMe(_OwnModel):
    """Moves w_i towards θ, which minimises f_i(θ) + (λ/2) ‖θ - w_i‖²: w_i <- w_i - η λ (w_i - θ) in each local step.

    Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, Algorithm 1. For each
    batch θ takes K steps of plain gradient descent from w_i; the last θ of a round is the client's own model. The step
    of w_i is one of the module's optimizer along λ (w_i - θ). The server's β is ``aggregator.lr`` of FedAvg. With K = 1
    and SGD it is FedAvg at the rate η λ η_θ.

    Args:
        lam: λ above 0.
        inner_steps: K; the first step needs no second gradient.
        inner_lr: η_θ above 0, the rate of θ.
    """

    replaces_gradient = True

    def __init__(self, lam: float = 15.0, inner_steps: int = 5, inner_lr: float = 0.05) -> None:
        self.lam = expect_number("--client.lam", lam, above=0, of="PFedMe")
        self.inner_steps = expect_count("--client.inner_steps", inner_steps, of="PFedMe")
        self.inner_lr = expect_number("--client.inner_lr", inner_lr, above=0, of="PFedMe")
        self.takes_second_gradient = inner_steps > 1

    def on_before_optimizer_step(self, trainer: TrainerLike, pl_module: LightningModule, optimizer: Any) -> None:  # type: ignore[override]  # our trainer stands in
        vector, theta = trainer.vector, self.scratch("own", trainer.weights)
        gradient, away = self.scratch("gradient", theta), self.scratch("away", theta)
        theta.copy_(vector.data)
        gradient.copy_(vector.grad)
        for step in range(self.inner_steps):
            if step:
                trainer.gradient_at(theta, gradient)
                gradient.add_(away.copy_(theta).sub_(vector.data), alpha=self.lam)
            theta.sub_(gradient, alpha=self.inner_lr)
        vector.grad.copy_(away.copy_(vector.data).sub_(theta).mul_(self.lam))


class _OwnSteps(_OwnModel):
    """Lets each client's own model v_i take a step on the batch of every local step, beside w_i.

    The step is one of the module's optimizer, with a state for v_i that starts anew in each round, as that of w_i does.
    Clipping bounds the gradient of w_i alone. A client whose v_i is no longer finite has diverged.
    """

    takes_second_gradient = True
    adds_to_gradient = False
    _optimizer: FlatOptimizer | None = None

    @abstractmethod
    def own_gradient(self, trainer: TrainerLike, own: Tensor, out: Tensor) -> None:
        """Computes the gradient by which v_i is stepped, shape (d,), or (m, d) for m clients."""

    def check(self, trainer: Any) -> None:
        super().check(trainer)
        optimizer = trainer.optimizers[0]
        if type(optimizer) not in ELEMENTWISE:
            raise FederatedError(
                f"Expected an optimizer that steps each weight by its own gradient alone for {self.key}, which steps "
                f"the clients' own models too, got {type(optimizer).__name__}: change `--model.optimizer`."
            )

    def on_round_start(self, trainer: TrainerLike, pl_module: LightningModule, cohort: Cohort) -> None:
        """Prepares to look anew at what the optimizer holds: callbacks may have unfrozen parameters."""
        self._optimizer = None

    def on_client_start(self, trainer: TrainerLike, pl_module: LightningModule, client: Client) -> None:
        super().on_client_start(trainer, pl_module, client)
        self.scratch("rate", trainer.weights[:1]).fill_(client.lr_factor)
        self.scratch("gradient", trainer.weights)
        rows, gradients = (vars(self)["_vectors"][name] for name in ("own", "gradient"))  # of all lanes
        if self._optimizer is None or self._optimizer.weights is not rows:
            theirs = trainer.optimizers[0]
            initial = {p: deepcopy(state) for p, state in theirs.state.items()}  # nobody has taken a step yet
            many = rows.ndim > 1  # of whom each has a gradient for every parameter
            self._optimizer = FlatOptimizer(theirs, trainer.vector, rows, gradients, initial, fuse=many, apart=not many)

    def on_before_optimizer_step(self, trainer: TrainerLike, pl_module: LightningModule, optimizer: Any) -> None:  # type: ignore[override]  # our trainer stands in
        """Steps v_i, by the client's own factor on the learning rate."""
        own, gradient = (self.scratch(name, trainer.weights) for name in ("own", "gradient"))
        self.own_gradient(trainer, own, gradient)
        assert self._optimizer is not None
        if trainer.local_step == 0:
            self._optimizer.start(len(own))
        elif own.ndim > 1:
            self._optimizer.narrow(len(own))
        if own.ndim == 1:  # what the batch does not reach stays, whatever decay and momentum would make of it
            places = trainer.vector.places().items()
            self._optimizer.skip([at for p, at in places if p.grad is None and not gradient[at].any()])
        before = own.clone() if trainer.work is not None and trainer.work.changes_rates else None
        self._optimizer.step()
        if before is not None:
            torch.lerp(before, own, self.scratch("rate", trainer.weights[:1]), out=own)

    def own_vectors(self, trainer: TrainerLike) -> tuple[Tensor, ...]:
        return (self.scratch("own", trainer.weights),)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self._optimizer = None


class Ditto(_OwnSteps):
    """Trains a v_i of each client's own on f_i(v_i) + (λ/2) ‖v_i - w‖², with w the model that it gets; w_i as ever.

    Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1:
    v_i <- v_i - η (∇f_i(v_i) + λ (v_i - w)), here on the batch of each local step of w_i. The global model is that of
    plain local training, bit for bit. λ = 0 is ``LocalOnly`` for clients that are drawn from the first round on; with
    η λ = 1 v_i is one step away from w.

    Args:
        lam: λ of at least 0.
    """

    def __init__(self, lam: float = 0.1) -> None:
        self.lam = expect_number("--client.lam", lam, least=0, of="Ditto")

    def own_gradient(self, trainer: TrainerLike, own: Tensor, out: Tensor) -> None:
        trainer.gradient_at(own, out)
        if self.lam:
            out.add_(torch.sub(own, trainer.received, out=self.scratch("away", own)), alpha=self.lam)


class APFL(_OwnSteps):
    """Trains a v_i of each client's own through the mixture v̄_i = α v_i + (1 - α) w_i, which is its own model.

    Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", 2020, arXiv:2003.13461, Algorithm 1: on the batch
    of each local step v_i <- v_i - η α ∇f_i(v̄_i), with the w_i before its own step, and, if α adapts, α <- α - η
    ⟨v_i - w_i, ∇f_i(v̄_i)⟩ within [0, 1]. The global model is that of plain local training, bit for bit. The own model
    mixes v_i with the global model of the round. α = 0 is that one, α = 1 is ``LocalOnly`` for clients that are drawn
    from the first round on.

    Args:
        alpha: α in [0, 1], at the start if it adapts.
        adaptive: Whether each client has an α of its own that adapts.
    """

    def __init__(self, alpha: float = 0.5, adaptive: bool = False) -> None:
        self.alpha = expect_number("--client.alpha", alpha, least=0, most=1, of="APFL")
        self.adaptive = expect_choice("--client.adaptive", adaptive, (True, False), of="APFL")

    def _share(self, trainer: TrainerLike, client: int) -> Tensor:
        """Fetches a client's α."""
        share = self.scratch("share", trainer.weights[:1])
        if not (self.adaptive and trainer.client_states.recall("APFL_alpha", client, share)):
            share.fill_(self.alpha)
        return share

    def on_client_start(self, trainer: TrainerLike, pl_module: LightningModule, client: Client) -> None:
        super().on_client_start(trainer, pl_module, client)
        self._share(trainer, client.id)

    def own_gradient(self, trainer: TrainerLike, own: Tensor, out: Tensor) -> None:
        share, point = self.scratch("share", trainer.weights[:1]), self.scratch("mixture", own)
        live = trainer.vector.data.to(own.dtype)
        trainer.gradient_at(torch.lerp(live, own, share, out=point), out)
        slope = torch.sub(own, live, out=point).mul_(out).sum(dim=-1, keepdim=True) if self.adaptive else None
        out.mul_(share)
        if slope is not None:
            rate = self.scratch("rate", trainer.weights[:1])  # the client's own factor
            share.sub_(slope.mul_(rate), alpha=float(trainer.optimizers[0].param_groups[0]["lr"])).clamp_(0, 1)

    def on_client_entered(self, trainer: TrainerLike, pl_module: LightningModule, update: Update) -> None:
        super().on_client_entered(trainer, pl_module, update)
        if self.adaptive:
            share = self.scratch("share", trainer.weights[:1])
            trainer.client_states.store("APFL_alpha", update.client.id, share)

    def load_own(self, trainer: TrainerLike, client: int) -> None:
        shown, live = self.scratch("shown", trainer.weights), trainer.vector.data
        if trainer.client_states.recall(self.key, client, shown):
            live.copy_(torch.lerp(live.to(shown.dtype), shown, self._share(trainer, client)))


class PerFedAvg(ClientAlgorithm):
    """Trains the loss after one step, F_i(w) = f_i(w - α ∇f_i(w)): g = (I - α ∇²f_i(w)) u, u = ∇f_i(w - α ∇f_i(w)).

    Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
    Meta-Learning Approach", NeurIPS 2020, Algorithm 1. The gradients are over independent parts of each batch: the step
    inside over the first, u over the second, the Hessian over a third. In ``first_order`` g = u; in ``hessian_free``
    ∇²f_i(w) u is (∇f_i(w + δ u) - ∇f_i(w - δ u)) / 2δ. The rate of the outer step is the module's optimizer's. A
    client's own model is the global one after a step of its own. α = 0 is plain local training on a part of each batch.

    Args:
        alpha: α of at least 0, the rate of the step inside.
        form: How the Hessian is taken.
        delta: δ above 0.
    """

    stacks = True
    replaces_gradient = True
    takes_second_gradient = True

    def __init__(
        self,
        alpha: float = 0.01,
        form: Literal["first_order", "hessian_free"] = "first_order",
        delta: float = 0.001,
    ) -> None:
        self.alpha = expect_number("--client.alpha", alpha, least=0, of="PerFedAvg")
        self.form = expect_choice("--client.form", form, ("first_order", "hessian_free"), of="PerFedAvg")
        self.delta = expect_number("--client.delta", delta, above=0, of="PerFedAvg")

    def on_before_optimizer_step(self, trainer: TrainerLike, pl_module: LightningModule, optimizer: Any) -> None:  # type: ignore[override]  # our trainer stands in
        vector, hessian_free = trainer.vector, self.form == "hessian_free"
        parts, point = 3 if hessian_free else 2, self.scratch("point", trainer.weights)
        gradient = self.scratch("gradient", point)
        trainer.gradient_at(vector.data, gradient, part=(0, parts))
        point.copy_(vector.data).sub_(gradient, alpha=self.alpha)
        trainer.gradient_at(point, gradient, part=(1, parts))
        if hessian_free:
            sides = []
            for side in (1, -1):
                point.copy_(vector.data).add_(gradient, alpha=side * self.delta)
                sides.append(self.scratch(f"side {side}", point))
                trainer.gradient_at(point, sides[-1], part=(2, parts))
            gradient.sub_(sides[0].sub_(sides[1]), alpha=self.alpha / (2 * self.delta))
        vector.grad.copy_(gradient)
