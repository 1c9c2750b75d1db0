"""A seeded random state for code that draws from the global streams."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["isolated_random_state"]


@contextmanager
def isolated_random_state(seed: int) -> Iterator[None]:
    """Seeds the global CPU streams of Python, NumPy and torch inside the block and restores them after it.

    A user's transform draws from these streams; without this it would move the streams that dropout draws from, and
    its own draws would depend on which clients came before.
    """
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - transforms draw from it
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 - as above
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])  # noqa: NPY002 - as above
        torch.set_rng_state(state[2])
