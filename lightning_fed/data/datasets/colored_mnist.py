"""MNIST with colours or rotations that depend on the client."""

from typing import Any

from lightning_fed.data.datasets.mnist import MNIST
from lightning_fed.data.skews import BinaryColors, ClassColors, ClientColors, ClientRotation, FeatureSkew

__all__ = ["ColoredMNIST", "ColoredMNISTBinary", "FedCMNIST", "FedRotMNIST"]


class FedCMNIST(MNIST):
    """MNIST with a colour for each digit and another set of colours at each client, shape (3, 28, 28), 10 classes.

    Source: section 5.3 of Tenison et al., "Gradient Masked Averaging for Federated Learning", TMLR 2023; see
    ``ClientColors`` for what it leaves open. There are two test sets: ``seen_schemes`` in the clients' colours, and
    ``new_scheme`` in colours that no client has, which is the paper's. The files are those of ``MNIST``.

    Args:
        skew: How the clients differ.
        **kwargs: Every other option of ``MNIST``.
    """

    def __init__(self, skew: FeatureSkew | None = ClientColors(), **kwargs: Any) -> None:  # noqa: B008 - holds no state
        super().__init__(skew=skew, **kwargs)


class FedRotMNIST(MNIST):
    """MNIST turned by another angle at each client, shape (1, 28, 28), 10 classes.

    Named in the caption of Table 3 of Tenison et al., "Gradient Masked Averaging for Federated Learning", TMLR 2023,
    which does not define it; ``ClientRotation`` explains our reading. There are two test sets: ``seen_schemes`` at the
    clients' angles, and ``new_scheme`` at an angle that no client has. The files are those of ``MNIST``.

    Args:
        skew: How the clients differ.
        **kwargs: Every other option of ``MNIST``.
    """

    def __init__(self, skew: FeatureSkew | None = ClientRotation(), **kwargs: Any) -> None:  # noqa: B008 - holds no state
        super().__init__(skew=skew, **kwargs)


class ColoredMNISTBinary(MNIST):
    """Is a digit 5 or above? Its colour predicts that well at the clients, but misleads in the test set.

    Source: Arjovsky et al., "Invariant Risk Minimization", 2019, with the rates of the workshop paper on FedGMA
    (Tenison et al., 2021), see ``BinaryColors``. Images of shape (3, 28, 28), 2 classes; partitioners split by the
    digit, as the paper does. Of the two test sets, ``new_scheme`` is the paper's: reversed colours. The files are those
    of ``MNIST``.

    Args:
        skew: The rates of flipped colours and labels.
        **kwargs: Every other option of ``MNIST``.
    """

    def __init__(self, skew: FeatureSkew | None = BinaryColors(), **kwargs: Any) -> None:  # noqa: B008 - holds no state
        super().__init__(skew=skew, **kwargs)


class ColoredMNIST(MNIST):
    """MNIST with two foreground and two background colours for each digit, shape (3, 28, 28), 10 classes.

    Source: Arpit et al., "Predicting with High Correlation Features", 2019, and the workshop paper on FedGMA (Tenison
    et al., 2021), see ``ClassColors``. The colours are the same at all clients. Of the two test sets, ``new_scheme`` is
    the papers': other colours, which do not depend on the digit. The files are those of ``MNIST``.

    Args:
        skew: How many colours there are.
        **kwargs: Every other option of ``MNIST``.
    """

    def __init__(self, skew: FeatureSkew | None = ClassColors(), **kwargs: Any) -> None:  # noqa: B008 - holds no state
        super().__init__(skew=skew, **kwargs)
