"""The base of client algorithms: callbacks that change local training."""

from typing import Literal

from lightning.pytorch import Callback
from torch import Tensor

from lightning_fed.aggregators.base import Aggregator
from lightning_fed.core.hooks import FederatedCallback, TrainerLike
from lightning_fed.core.updates import Client
from lightning_fed.errors import FederatedError, expect

__all__ = ["ClientAlgorithm"]


class ClientAlgorithm(FederatedCallback):
    """Does nothing: plain local training with the module's own optimizer.

    Subclasses shift the start in ``on_client_start``, replace the gradient, scale it or add to it in
    ``on_before_optimizer_step`` (the order is replace, scale, add, clip, step), read the result in ``on_client_end``,
    where ``update.send`` sends more than δ_i, and write what the client keeps in ``on_client_entered``. At hand, each
    of shape (d,):

    - ``trainer.vector.data``: the live weights; ``trainer.vector.add_to_gradient(term)`` adds to their gradient, and
      ``scale_gradient(factor)`` scales it before, if the class says ``scales_gradient = True``
    - ``trainer.vector.personal``: the live weights that stay with the client, if any do, (p,); the others are shared
    - ``trainer.weights``: the round's global model w; ``trainer.received``: what clients get, which is w too unless the
      aggregator sends another, as FedACG does
    - ``trainer.origin``: the live weights that stand for w, from which the update is measured: w, unless an algorithm
      displaced the start and said so by setting it. A term that reads the iterate uses ``vector.data - origin``
    - ``trainer.displacement``: set in ``on_client_start`` to take every gradient at the live weights less this vector
    - ``trainer.client_states``: what clients keep from one of their rounds to the next, in any shape, by client id
    - ``trainer.start_gradients``: gradients at w over the clients' full data, as asked for by ``start_gradients``
    - ``trainer.gradient_at(point, out)``: in ``on_before_optimizer_step``, a second gradient of the step's batch, at
      another point, if the class says ``takes_second_gradient = True``

    Attributes:
        needs_distance: Whether ``Update.optimizer_distance`` is needed: the client's optimizer must then be SGD.
        over: What the gradients that it asks for are over: all of a client's ``data``, or the ``batch`` that its first
            local step takes.
        takes_second_gradient: Whether it calls ``trainer.gradient_at``: the batch of each step is kept for it.
        at_nodes: Whether clients at the nodes of a fleet can train by it; not if the server reads what happens there.
        takes_sample_gradients: Whether ``combine`` makes the gradient of each step of those of the batch's samples.
        displaces: Whether it moves the point where gradients are taken; only one algorithm of a run can.
        adds_linear_term: Whether it adds a vector of the client's own to every gradient; only one algorithm can.
        has_own_model: Whether each client has a model of its own besides the global one, which ``load_own`` puts in;
            only one algorithm can.
        server_half: The aggregator that it goes with alone, None if it goes with any.
        vectors_down: Vectors of length d that a client gets in a round besides the model and the exchange's.
        sends_gradient: Whether a client sends its gradient at w too, unless an exchange has it.
    """

    adds_to_gradient = True
    needs_distance: bool = False
    over: Literal["data", "batch"] = "data"
    takes_second_gradient: bool = False
    at_nodes: bool = True
    takes_sample_gradients: bool = False
    displaces: bool = False
    adds_linear_term: bool = False
    has_own_model: bool = False
    server_half: type[Aggregator] | None = None
    vectors_down: int = 0
    sends_gradient: bool = False

    @property
    def pull(self) -> float:
        """The factor of (w_i - w) in the term that the algorithm adds to the gradient."""
        return 0.0

    def check(self, trainer: TrainerLike) -> None:
        """Refuses, before the first round, what the algorithm cannot work with; overrides must call this one too.

        It refuses optimizers that maximise, and a line search by a loss without the term added to the gradient.
        """
        optimizer, name = trainer.optimizers[0], type(self).__name__
        counts = not getattr(self, "vectors_up", 0)
        expect(counts, f"Expected {name} to send vectors by `update.send`, which counts them, got `vectors_up`.")
        if any(group.get("maximize") for group in optimizer.param_groups):
            raise FederatedError(
                f"Expected an optimizer that minimises for {name}, got {type(optimizer).__name__} with maximize=True: "
                "return the negative loss from `training_step` and leave maximize out of `--model.optimizer`."
            )
        adds = type(self).on_before_optimizer_step is not Callback.on_before_optimizer_step
        if adds and any(group.get("line_search_fn") for group in optimizer.param_groups):
            raise FederatedError(
                f"Expected an optimizer without line search for {name}, which changes the gradient but not the loss "
                f"that it uses, got {type(optimizer).__name__} with one: leave line_search_fn out of "
                "`--model.optimizer`."
            )

    def combine(self, trainer: TrainerLike, client: Client, batch_idx: int, gradients: Tensor, out: Tensor) -> None:
        """Makes a step's gradient ``out``, shape (d + p,), of those of a batch's samples, shape (b, d + p)."""

    def load_own(self, trainer: TrainerLike, client: int) -> None:
        """Writes a client's own model to the live weights, for its evaluation; before, they hold the global model.

        Call it only for a client whose records this process holds. It does nothing if the client has no model yet.
        """

    def own_vectors(self, trainer: TrainerLike) -> tuple[Tensor, ...]:
        """Returns what the client has trained besides the live weights: it has diverged if that is not finite.

        It is read after ``on_client_end``, and the client is left out before its records are written.
        """
        return ()

    def expect_no_linear_term(self, trainer: TrainerLike, why: str) -> None:
        """Refuses another algorithm that adds a linear term of the client's own, for the reason given."""
        for other in trainer.callbacks:
            if other is not self and getattr(other, "adds_linear_term", False):
                both = f"{type(self).__name__} without {type(other).__name__}"
                raise FederatedError(f"Expected {both}, {why}: leave one out of `--client`.")
