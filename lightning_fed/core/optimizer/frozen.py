"""The parameters that no client trains: outside the flat vector, and the same for all clients."""

from torch import Tensor, nn

from lightning_fed.errors import FederatedError

__all__ = ["FrozenParameters"]


class FrozenParameters:
    """Watches over the parameters that were frozen when ``fit`` began.

    Args:
        module: The module, as clients will train it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._name = type(module).__name__
        self._frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
        self._sums: list[Tensor] | None = None
        self._watched = not self._frozen

    def expect_frozen(self) -> None:
        """Refuses parameters unfrozen since: clients would train them, and not send them back."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise FederatedError(
                    f"Expected `{name}` of {self._name} to stay frozen as it was when `fit` began, but it requires a "
                    "gradient now: unfreeze it in `__init__` or `configure_model`."
                )

    def expect_unchanged(self) -> None:
        """Refuses what the first client changed, such as a moving average: it would leak into the next client.

        Call between clients. The first call sums each parameter, the second compares, later ones cost nothing.
        """
        if self._watched:
            return
        sums = [p.detach().double().sum() for _, p in self._frozen]
        if self._sums is None:
            self._sums = sums
            return
        self._watched = True
        for (name, _), before, now in zip(self._frozen, self._sums, sums, strict=True):
            if not bool((before == now) | (before.isnan() & now.isnan())):
                raise FederatedError(
                    f"Expected `{name}` of {self._name}, which is frozen, to stay as it is while a client trains, but "
                    "it was changed: register it as a buffer with `register_buffer`, which clients send back."
                )
