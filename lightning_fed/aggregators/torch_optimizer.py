"""Any torch optimizer as the server rule."""

from copy import deepcopy
from typing import Any

from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer, SparseAdam

from lightning_fed.aggregators.base import Aggregator
from lightning_fed.core.updates import ReducedUpdate
from lightning_fed.errors import FederatedError

__all__ = ["ServerOptimizer"]


class ServerOptimizer(Aggregator):
    """Steps a torch optimizer on the global vector, with the pseudo-gradient -Δ as gradient (Reddi et al., ICLR 2021).

    The optimizer steps from w to w_new; then w <- w + η_g m ⊙ (w_new - w). SGD with learning rate 1 is FedAvg up to
    rounding; with momentum too it is FedAvgM. torch's Adam is not FedAdam: it corrects the bias of both moments, starts
    v at 0 and scales ε with that correction. Weight decay and the like act on the global vector w.

    Args:
        optimizer: Makes the torch optimizer from parameters. Its step already has its learning rate; ``lr`` scales it.
        **kwargs: Options of every aggregator.
    """

    def __init__(self, optimizer: OptimizerCallable = lambda params: SGD(params, lr=1.0), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not callable(optimizer):
            raise FederatedError(
                f"Expected `--aggregator.optimizer` to make an optimizer from parameters, got {optimizer!r}."
            )
        self._make_optimizer = optimizer
        self._forget()

    def _forget(self) -> None:
        self._optimizer: Optimizer | None = None
        self._saved: dict[str, Any] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._forget()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Makes the optimizer, so that an unusable one is refused before the first round."""
        self._start_from(trainer.weights)

    def step(self, trainer: Any, pl_module: Any, update: ReducedUpdate) -> None:
        self._start_from(trainer.weights)
        super().step(trainer, pl_module, update)

    def server_step(self, update: ReducedUpdate) -> Tensor:
        assert self._optimizer is not None
        self._point.grad = -update.mean
        self._optimizer.step()
        self._point.grad = None
        return self._point.detach() - self._weights

    def _start_from(self, weights: Tensor) -> None:
        self._weights = weights
        if self._optimizer is None:
            self._point = nn.Parameter(weights.clone())
            self._optimizer = self._build()
            self._restore(self._optimizer)
        self._point.detach().copy_(weights)

    def _build(self) -> Optimizer:
        try:
            optimizer = self._make_optimizer([self._point])
        except ValueError as error:
            raise FederatedError(
                "Expected `--aggregator.optimizer` to make an optimizer over one vector of all parameters, got "
                f"{str(error).rstrip('.')!r}: choose another one."
            ) from error
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, (LBFGS, SparseAdam)):
            raise FederatedError(
                "Expected `--aggregator.optimizer` to make a torch optimizer that steps by one dense gradient, got "
                f"{type(optimizer).__name__}: choose another one, such as torch.optim.SGD."
            )
        self._built = _options(optimizer)
        return optimizer

    def _restore(self, optimizer: Optimizer) -> None:
        """Loads a checkpoint's state; refuses changed options, because torch would restore the old ones."""
        if not self._saved:
            return
        was, now = self._saved["built"], self._built
        changed = sorted(name for name in was.keys() & now.keys() if was[name] != now[name])
        if was.keys() != now.keys() or changed:
            name = changed[0] if changed else min(was.keys() ^ now.keys())
            raise FederatedError(
                f"Expected the server optimizer of the checkpoint's run, with {name} {was.get(name)}, "
                f"got {now.get(name)}: a resumed run keeps its options; to change them, start a new run with "
                "`--weights` instead of `--ckpt_path`."
            )
        optimizer.load_state_dict(self._saved["optimizer"])
        self._saved = {}

    def state_dict(self) -> dict[str, Any]:
        if self._optimizer is None:
            return {}
        return {"optimizer": deepcopy(self._optimizer.state_dict()), "built": dict(self._built)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned, at once or when the optimizer is made."""
        self._saved = dict(state_dict)
        if self._optimizer is not None:
            self._restore(self._optimizer)


def _options(optimizer: Optimizer) -> dict[str, str]:
    """Names an optimizer: its class and the options of its one parameter group."""
    (group,) = optimizer.param_groups
    options = {name: repr(value) for name, value in group.items() if name != "params"}
    return {"class": type(optimizer).__name__, **options}
