"""The published splits by label that are called Dirichlet; they differ, so each has its own name.

"Dir(0.1)" alone does not define a split. The distribution may be that of a client over the classes or of a class over
the clients, and one recipe multiplies α by the classes' shares.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_fed.data.partitioners.base import Owners, Partitioner, TooSmall, Values, by_class, class_codes, deal
from lightning_fed.errors import expect_number

__all__ = ["DirichletBalanced", "DirichletByClass", "DirichletByClient", "draw_classes"]

_Ints = npt.NDArray[np.int64]
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

    reads = "targets"
    sizes_vary = False

    def __init__(self, alpha: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        expect_number("--data.partitioner.alpha", alpha, above=0)
        self.alpha = alpha

    def assign(self, targets: Values, num_samples: int, num_clients: int, generator: np.random.Generator) -> Owners:
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

    reads = "targets"

    def __init__(self, alpha: float = 0.5, min_samples: int = 10, too_small: TooSmall = "redraw") -> None:
        super().__init__(min_samples, too_small)
        expect_number("--data.partitioner.alpha", alpha, above=0)
        self.alpha = alpha

    def assign(self, targets: Values, num_samples: int, num_clients: int, generator: np.random.Generator) -> Owners:
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


def draw_classes(counts: _Ints, client: _Ints, alpha: float, generator: np.random.Generator) -> _Ints:
    """Draws a class for each place (a sample that a client will hold), each class as often as it has samples.

    All places draw. A class serves the places that drew it, in random order, until it has no samples left. The others
    draw again among the classes that are left. Each pass empties at least one class, or serves all.

    A client's draws from q ~ Dir(a) follow Pólya's urn: with q integrated out, draw k + 1 is class c with probability
    (a_c + draws of c so far) / (Σ a + k). So each draw is either fresh, from a / Σ a, or repeats one of the k earlier
    draws at random (D. Blackwell, J. B. MacQueen, "Ferguson distributions via Pólya urn schemes", The Annals of
    Statistics 1973), and memory is proportional to the samples, without a table of clients × classes. Restricted to
    some classes, q is again Dirichlet and independent of the other classes, so a second draw among fewer classes uses
    only the earlier draws of these classes.

    Args:
        counts: Samples of each class, at least 1, shape (classes,).
        client: The client of each place, ascending, shape (samples,).
        alpha: Concentration α; the prior is Dir(α p) with p = counts / samples.
        generator: What is drawn from.

    Returns:
        The class of each place, shape (samples,).
    """
    num_places, left = len(client), counts.copy()
    drawn = np.full(num_places, -1, dtype=np.int64)
    priority = generator.permutation(num_places)
    waiting = np.arange(num_places)
    while len(waiting):
        base = np.where(left > 0, alpha * (counts / num_places), 0.0)
        settled = np.flatnonzero((drawn >= 0) & (left > 0)[drawn])
        wanted = _draw_once(base, client[settled], drawn[settled], client[waiting], generator)
        served = _first_come(wanted, priority[waiting], left)
        drawn[waiting[served]] = wanted[served]
        left -= np.bincount(wanted[served], minlength=len(left))
        waiting = waiting[~served]
    return drawn


def _draw_once(
    base: npt.NDArray[np.float64], old_client: _Ints, old_class: _Ints, client: _Ints, generator: np.random.Generator
) -> _Ints:
    """Draws one class for each place from its client's urn.

    Args:
        base: Weights of fresh draws, α p, 0 for classes that may not be drawn; shape (classes,).
        old_client: The client of each earlier draw, ascending.
        old_class: The class of each earlier draw; its base is not 0.
        client: The client of each place that draws, ascending.
        generator: What is drawn from.

    Returns:
        The classes, shape (places,).
    """
    edges = np.cumsum(base)
    place = np.arange(len(client))
    turn = place - np.searchsorted(client, client)  # draws of the client before this one
    first = np.searchsorted(old_client, client)
    former = np.searchsorted(old_client, client, side="right") - first
    fresh = edges[-1]
    point = generator.random(len(client)) * (fresh + former + turn)
    is_fresh = (point < fresh) | (former + turn == 0)
    # The number of the draw that is repeated, counted over the client's draws; those before this pass come first.
    back = np.clip(point - fresh, 0, former + turn - (former + turn > 0)).astype(np.int64)
    repeats_old = ~is_fresh & (back < former)
    classes = np.searchsorted(edges, np.minimum(point, fresh), side="right")
    classes = np.minimum(classes, np.flatnonzero(base)[-1])
    classes[repeats_old] = old_class[(first + back)[repeats_old]]
    is_root = is_fresh | repeats_old
    parent = np.where(is_root, place, place - turn + back - former)
    while not np.array_equal(further := parent[parent], parent):  # follows each pointer to its end, halving all paths
        parent = further
    return np.asarray(classes[parent])


def _first_come(wanted: _Ints, priority: _Ints, left: _Ints) -> npt.NDArray[Any]:
    """Says which places are served, for each class as many as it has samples left, by priority: (places,), bool."""
    asked = np.bincount(wanted, minlength=len(left))
    served = np.ones(len(wanted), dtype=bool)
    contested = np.flatnonzero((asked > left)[wanted])
    in_line = contested[np.argsort(priority[contested])]
    in_line = in_line[np.argsort(wanted[in_line].astype(np.min_scalar_type(len(left))), kind="stable")]
    rank = np.arange(len(in_line)) - np.searchsorted(wanted[in_line], wanted[in_line])
    served[in_line] = rank < left[wanted[in_line]]
    return served
