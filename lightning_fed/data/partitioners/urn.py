"""Draws from one Dirichlet distribution per client, with memory proportional to the number of samples.

A client's draws from q ~ Dir(a) follow Pólya's urn: with q integrated out, draw k + 1 is class c with probability
(a_c + draws of c so far) / (Σ a + k). So each draw is either fresh, from a / Σ a, or repeats one of the k earlier draws
at random (D. Blackwell, J. B. MacQueen, "Ferguson distributions via Pólya urn schemes", The Annals of Statistics 1973).
No table of clients × classes is needed. Restricted to some classes, q is again Dirichlet and independent of the other
classes. So a second draw among fewer classes uses only the earlier draws of these classes.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["draw_classes"]

_Ints = npt.NDArray[np.int64]


def draw_classes(counts: _Ints, client: _Ints, alpha: float, generator: np.random.Generator) -> _Ints:
    """Draws a class for each place (a sample that a client will hold), each class as often as it has samples.

    All places draw. A class serves the places that drew it, in random order, until it has no samples left. The others
    draw again among the classes that are left. Each pass empties at least one class, or serves all.

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
    roots = _roots(np.where(is_root, place, place - turn + back - former))
    return np.asarray(classes[roots])


def _roots(parent: _Ints) -> _Ints:
    """Follows each pointer to its end, halving all paths at once."""
    while not np.array_equal(further := parent[parent], parent):
        parent = further
    return parent


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
