"""What a user writes outside the package: classes whose arguments carry the names of other classes' arguments."""

from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import SGD

from lightning_fed.aggregators import Aggregator
from lightning_fed.client_algorithms import ClientAlgorithm
from lightning_fed.data import Partitioner
from lightning_fed.errors import FederatedError
from lightning_fed.masks import Mask


class OtherAggregator(Aggregator):
    """An aggregator with the arguments of FedAvg."""

    def server_step(self, update) -> Tensor:
        return update.mean


class OtherMask(Mask):
    """A mask with an argument of SignAgreement."""

    def __init__(self, threshold: float = 0.9) -> None:
        super().__init__()
        self.threshold = threshold

    def compute(self, update) -> Tensor:
        return update.mean.abs() > self.threshold


class OtherPartitioner(Partitioner):
    """A partitioner with the argument of Shards."""

    def __init__(self, classes_per_client: int = 7) -> None:
        self.classes_per_client = classes_per_client

    def assign(self, targets, num_samples, num_clients, generator):
        raise AssertionError("no data is split here")


class Pull(ClientAlgorithm):
    def __init__(self, mu: float = 0.1) -> None:
        self.mu = mu


class Push(ClientAlgorithm):
    def __init__(self, mu: float = 0.2, beta: float = 0.5) -> None:
        self.mu, self.beta = mu, beta


class Failing(ClientAlgorithm):
    """Raises from its constructor."""

    def __init__(self, how: str = "defect") -> None:
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "mistake":
            raise FederatedError("Expected `--client.how` to be kind,\n got mistake.")
        if how == "lightning":
            raise MisconfigurationException("Lightning does not\nlike it.")
        raise RuntimeError("a defect of the user's own")


class Plain(LightningModule):
    """A module with an optimizer chosen from the command line.

    Args:
        width: How wide it is.
        optimizer: Makes the optimizer.
    """

    def __init__(self, width: int = 3, optimizer: OptimizerCallable = lambda params: SGD(params, lr=0.05)) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 1)
        self.optimizer = optimizer

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


class OtherPlain(LightningModule):
    """Another module with the same argument."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 1)
