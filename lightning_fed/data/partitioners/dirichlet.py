"""The published splits by label that are called Dirichlet; they differ, so each has its own name.

"Dir(0.1)" alone does not define a split. The distribution may be that of a client over the classes or of a class over
the clients, and one recipe multiplies α by the classes' shares.
"""

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from lightning_fed.data.partitioners.base import Owners, Partitioner, Reads, TooSmall, Values
from lightning_fed.data.partitioners.dealing import by_class, class_codes, deal
from lightning_fed.data.partitioners.urn import draw_classes
from lightning_fed.errors import expect_number

__all__ = ["DirichletBalanced", "DirichletByClass", "DirichletByClient"]

_Shares = npt.NDArray[np.float64]


class DirichletByClient(Partitioner):
    """Each client draws its own distribution over the classes; all clients are of equal size.

    Client i draws q_i ~ Dir(α p), where p are the classes' shares of the data, and then the class of each of its
    samples from q_i. Sizes differ by at most one. A client's share of class c has mean p_c and, apart from the finite
    data, variance p_c (1 − p_c) / (α + 1). If a class has run out, the client draws again, from q_i restricted to the
    classes that are left, after the others have drawn. So for small α a client can get classes unlikely under q_i.

    With C balanced classes every class has the parameter α / C. A recipe with q_i ~ Dir(a, ..., a), as in D. A. E. Acar
    et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, has α = a C.

    Source: T.-M. H. Hsu, H. Qi, M. Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated
    Visual Classification", 2019, https://arxiv.org/abs/1909.06335; single draws with repetition, Acar et al. 2021.

    Args:
        alpha: Concentration α > 0: near 0 each client has one class; the larger, the closer to IID.
        **kwargs: Options of every partitioner.
    """

    reads: ClassVar[Reads] = "targets"
    sizes_vary: ClassVar[bool] = False

    def __init__(self, alpha: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        expect_number("--data.partitioner.alpha", alpha, above=0)
        self.alpha = alpha

    def assign(self, targets: Values, num_samples: int, num_clients: int, generator: np.random.Generator) -> Owners:
        """Draws the class of each place, then deals the samples of each class to its places."""
        counts, codes = class_codes(targets)
        client = np.arange(num_samples, dtype=np.int64) * num_clients // num_samples
        drawn = draw_classes(counts, client, float(self.alpha), generator)
        owner = np.empty(num_samples, dtype=np.int64)
        owner[by_class(codes, generator)] = client[np.argsort(drawn.astype(codes.dtype), kind="stable")]
        return owner


class DirichletByClass(Partitioner):
    """Each class is divided over the clients in shares of its own; clients differ in size too.

    Class c with m_c samples draws p_c ~ Dir_N(α). Client i gets m_c p_ci of them, rounded down or up, with mean m_c / N
    and variance m_c² (1/N)(1 − 1/N) / (α N + 1). A split in which a client has fewer than 10 samples is drawn again.

    Source: M. Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019, section 4;
    Q. Li, Y. Diao, Q. Chen, B. He, "Federated Learning on Non-IID Data Silos: An Experimental Study", ICDE 2022, which
    writes β. The code published with both papers does more than they say: see ``DirichletBalanced``.

    Args:
        alpha: Concentration α > 0: the smaller, the fewer clients share a class.
        min_samples: Fewest samples of a client; lower it if there are many clients with few samples.
        too_small: What to do when a client gets fewer: ``redraw``, ``refuse`` or ``allow``.
    """

    reads: ClassVar[Reads] = "targets"

    def __init__(self, alpha: float = 0.5, min_samples: int = 10, too_small: TooSmall = "redraw") -> None:
        super().__init__(min_samples, too_small)
        expect_number("--data.partitioner.alpha", alpha, above=0)
        self.alpha = alpha

    def assign(self, targets: Values, num_samples: int, num_clients: int, generator: np.random.Generator) -> Owners:
        """Draws the shares of each class in turn and deals its samples out."""
        counts, codes = class_codes(targets)
        members = np.split(by_class(codes, generator), np.cumsum(counts)[:-1])
        owner = np.empty(num_samples, dtype=np.int64)
        sizes = np.zeros(num_clients, dtype=np.int64)
        for rows in members:
            drawn = generator.dirichlet(np.full(num_clients, float(self.alpha)))
            shares = self._shares(drawn, sizes, num_samples, generator)
            owner[rows] = part = deal(shares, len(rows), generator)
            sizes += np.bincount(part, minlength=num_clients)
        return owner

    def _shares(self, drawn: _Shares, sizes: Owners, num_samples: int, generator: np.random.Generator) -> _Shares:
        """Returns the clients' shares of a class, not normalised; ``sizes`` counts their samples of earlier classes."""
        return drawn


class DirichletBalanced(DirichletByClass):
    """``DirichletByClass``, but a client that already holds n / N samples gets nothing of later classes.

    Class after class, in ascending order, the shares of full clients are set to 0 and those of the others normalised.
    So sizes are more even than with ``DirichletByClass``: a client exceeds n / N only by samples of its last class.
    Most code in use does this under the name Dirichlet.

    Source: the code published with Yurochkin et al., ICML 2019
    (https://github.com/IBM/probabilistic-federated-neural-matching) and with Li et al., ICDE 2022
    (https://github.com/Xtra-Computing/NIID-Bench); neither paper has it.
    """

    def _shares(self, drawn: _Shares, sizes: Owners, num_samples: int, generator: np.random.Generator) -> _Shares:
        room = sizes * len(sizes) < num_samples
        shares = np.where(room, drawn, 0.0)
        if not shares.any():
            # For small α the shares of clients with room can all round to 0. Normalised, they would be distributed as
            # Dir(α) over these clients, so they are drawn from it.
            shares[room] = generator.dirichlet(np.full(room.sum(), float(self.alpha)))
        return shares
