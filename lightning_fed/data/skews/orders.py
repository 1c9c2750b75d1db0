"""Orders of classes as numbers: drawn without repetition, and decoded where they are needed."""

import functools
import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["decode_orders", "draw_orders", "encode_orders"]

_MAX = 2**63 - 1
# Rows that are encoded at once.
_BLOCK = 2**16


def draw_orders(count: int, classes: int, generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """Draws orders of the classes, no two alike.

    Args:
        count: Orders, at most ``classes!``.
        classes: Classes.
        generator: The only randomness to draw from.

    Returns:
        The orders' numbers as of ``encode_orders``, shape (count, words).
    """
    space = math.factorial(classes)
    if 4 * count > space:  # repetitions would be drawn again and again
        return generator.choice(space, count, replace=False)[:, None].astype(np.int64, copy=False)
    sizes = [min(_BLOCK, count - start) for start in range(0, count, _BLOCK)]
    numbers = np.concatenate([_shuffled(np.tile(np.arange(classes), (size, 1)), generator) for size in sizes])
    # Of several words the first alone is compared: it tells far more orders apart than are drawn.
    while len(first := np.unique(numbers[:, 0], return_index=True)[1]) < count:
        again = np.ones(count, dtype=bool)
        again[first] = False
        repeated = decode_orders(torch.from_numpy(numbers[again]), classes).numpy()
        numbers[again] = _shuffled(repeated, generator)
    return numbers


def encode_orders(orders: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Numbers orders of C classes by their Lehmer codes: digit k counts the later classes that are smaller.

    The digits have the radices C, C - 1, ..., 1. Up to 20 classes their value is the order's place among all C! in
    lexicographic order; more digits than an int64 can hold go on in further ones, so that memory does not grow with C.
    Source: D. H. Lehmer, "Teaching combinatorial tricks to a computer", Proc. Symposia in Applied Mathematics 10, 1960.

    Args:
        orders: Permutations of 0 to C - 1, shape (count, C).

    Returns:
        Numbers of at least 0, shape (count, words), one word for at most 20 classes.
    """
    classes = orders.shape[1]
    word, weight, _ = _digits(classes)
    numbers = np.zeros((len(orders), int(word[-1]) + 1), dtype=np.int64)
    for place in range(classes):
        smaller = (orders[:, place + 1 :] < orders[:, place : place + 1]).sum(axis=1)
        numbers[:, word[place]] += smaller * weight[place]
    return numbers


def decode_orders(numbers: Tensor, classes: int) -> Tensor:
    """Returns the orders that ``encode_orders`` numbered, computed where the numbers are.

    Args:
        numbers: Shape (count, words), int64.
        classes: Number of classes C.

    Returns:
        Permutations of 0 to C - 1, shape (count, C), int64.
    """
    word, weight, radix = (torch.from_numpy(part).to(numbers.device) for part in _digits(classes))
    orders = numbers.index_select(1, word) // weight % radix
    for place in range(classes - 2, -1, -1):
        # A later class was counted among those that were left once this one was taken.
        later = orders[:, place + 1 :]
        later += later >= orders[:, place : place + 1]
    return orders


def _shuffled(orders: npt.NDArray[np.int64], generator: np.random.Generator) -> npt.NDArray[np.int64]:
    return encode_orders(generator.permuted(orders, axis=1))


@functools.cache
def _digits(classes: int) -> tuple[npt.NDArray[np.int64], ...]:
    """Returns the word that holds each digit, its weight there and its radix, shape (classes,) each."""
    radices = list(range(classes, 0, -1))
    groups: list[list[int]] = [[]]
    for radix in radices:
        if math.prod(groups[-1]) * radix > _MAX:
            groups.append([])
        groups[-1].append(radix)
    words = [word for word, group in enumerate(groups) for _ in group]
    weights = [math.prod(group[place + 1 :]) for group in groups for place in range(len(group))]
    return np.array(words), np.array(weights), np.array(radices)
