"""The base of client algorithms: callbacks on the one local loop."""

from lightning_fed.hooks import FederatedCallback

__all__ = ["ClientAlgorithm"]


class ClientAlgorithm(FederatedCallback):
    """Does nothing: plain local training with the module's own optimizer.

    Subclasses shift the start in ``on_client_start``, move the weights in ``on_local_step_start``, add to the gradient
    in ``on_before_optimizer_step`` (then come clipping and the step) and read the result in ``on_client_end``. The
    live weights are ``trainer.vector.data``, the live gradient ``trainer.vector.grad`` and the round's global model
    ``trainer.weights``, each of shape (d,).
    """
