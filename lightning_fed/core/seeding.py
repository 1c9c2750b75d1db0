"""Seeds as pure functions of (seed, purpose, round, client).

No result may depend on the order of clients, the number of processes or the engine, so nothing here draws from a
global random state: every stream is derived anew with ``numpy.random.SeedSequence([seed, purpose, round, client])``.
"""

import ctypes
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from lightning_fed.core.devices import device_streams, seed_devices, set_device_streams
from lightning_fed.errors import FederatedError

__all__ = [
    "GENERATORS", "MAX_SEED", "Purpose", "generator_for", "global_streams", "isolated_streams", "kept_streams",
    "numpy_generator_for", "run_seed", "seed_everywhere", "seed_for", "seed_generators", "seed_host", "seeds_for",
]  # fmt: skip

MAX_SEED = 2**63 - 1
GENERATORS = (torch.Generator, np.random.RandomState, np.random.Generator, random.Random)


class Purpose(IntEnum):
    """What a random stream is used for; the numbers are part of the reproducibility contract, never renumber them."""

    SPLIT = 0
    SAMPLE = 1
    SHUFFLE = 2
    LOCAL = 3
    EVALUATE = 4
    PREDICT = 5
    GRADIENT = 6
    ROUND = 7
    READ = 8
    SKEW = 9
    AUGMENT = 10
    AVAILABLE = 11
    SPEED = 12
    WORK = 13
    MASK = 14
    SERVER = 15
    TUNE = 16
    PAYLOAD = 17
    NOISE = 18


def seed_for(seed: int, purpose: Purpose, round: int = 0, client: int = 0, index: int | None = None) -> int:
    """Derives one 63-bit seed.

    Args:
        seed: The run's seed, at least 0.
        purpose: What the stream is for.
        round: Index of the round, 0 before training.
        client: Client id.
        index: A further number, where one client and round needs several streams of one purpose.

    Returns:
        An integer in [0, 2**63).
    """
    numbers = (seed, int(purpose), round, client) if index is None else (seed, int(purpose), round, client, index)
    low, high = np.random.SeedSequence(numbers).generate_state(2).tolist()
    return int(high << 32 | low) >> 1


def seeds_for(seed: int, purpose: Purpose, round: int, clients: Sequence[int]) -> list[int]:
    """Derives the seeds of some clients, in order."""
    return [seed_for(seed, purpose, round, client) for client in clients]


def generator_for(seed: int, purpose: Purpose, round: int = 0, client: int = 0) -> torch.Generator:
    """Returns a CPU generator of its own for one purpose, round and client."""
    return torch.Generator().manual_seed(seed_for(seed, purpose, round, client))


def numpy_generator_for(seed: int, purpose: Purpose, round: int = 0, client: int = 0) -> np.random.Generator:
    """Returns a NumPy generator of its own for one purpose, round and client."""
    return np.random.default_rng(np.random.SeedSequence([seed, int(purpose), round, client]))


def seed_everywhere(seed: int) -> None:
    """Seeds the global streams of Python, NumPy and torch (all devices), which dropout and user code draw from."""
    global _known
    _known = None, None  # the same words may come with another kept normal number after another start
    seed_host(seed)
    seed_devices(seed)


def seed_host(seed: int) -> None:
    """Seeds the global streams on the CPU."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002  # user transforms may draw from the global stream
    # Not torch.manual_seed: before CUDA is initialised it walks the whole call stack, 0.3 ms each time.
    torch.default_generator.manual_seed(seed)


def seed_generators(generators: Sequence[Any], seed: int) -> None:
    """Seeds random generators that the user's objects hold, each with a stream of its own."""
    for number, generator in enumerate(generators, start=1):
        own = (seed + (number << 32)) & MAX_SEED
        if isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(own).state
        elif isinstance(generator, np.random.RandomState):
            kind = type(generator._bit_generator)
            generator.set_state(np.random.RandomState(kind(own)).get_state(legacy=False))
        else:
            generator.seed(own)


def kept_streams(devices: bool = True) -> Callable[[], None]:
    """Returns what puts the global streams back to where they are now, those of ``devices`` too or the CPU's alone."""
    words, numpys = _numpy_stream()
    state = random.getstate(), torch.default_generator.get_state()
    others = device_streams() if devices else []

    def put_back() -> None:
        random.setstate(state[0])
        if words is None or numpys[3] or _numpy_words() != words:
            np.random.set_state(numpys)  # noqa: NPY002  # user transforms may draw from the global stream
        torch.default_generator.set_state(state[1])
        set_device_streams(others)

    return put_back


def global_streams() -> tuple[Any, ...]:
    """Returns what a draw from a global stream, on the CPU or a device, changes; it takes some 0.1 ms."""
    tensors = (torch.default_generator.get_state(), *device_streams())
    return hash(random.getstate()), _numpy_words(), *(tensor.cpu().numpy().tobytes() for tensor in tensors)


# The state of NumPy's global stream as last read, by its words. NumPy takes 0.1 ms to read or to set it.
_WORDS = 2500
_known: tuple[bytes | None, Any] = (None, None)


def _numpy_stream() -> tuple[bytes | None, Any]:
    """Returns words and state of NumPy's global stream."""
    global _known
    words = _numpy_words()
    if words is None or words != _known[0] or _known[1][3]:  # a kept normal number goes without a change of words
        _known = words, np.random.get_state()  # noqa: NPY002  # as above
    return _known


def _numpy_words() -> bytes | None:
    """Returns the words and the position of the global Mersenne twister, None if the user has put in another one."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # NumPy's stubs leave it out
    is_usual = isinstance(generator, np.random.MT19937)
    return ctypes.string_at(generator.ctypes.state_address, _WORDS) if is_usual else None


@contextmanager
def isolated_streams(seed: int | None = None) -> Iterator[None]:
    """Restores the global streams at the end of the block, also after an exception.

    Args:
        seed: Seeds the CPU streams within the block and leaves those of devices alone. A user's transform draws from
            them; without a seed its draws would depend on earlier clients, and would change what dropout draws.
    """
    put_back = kept_streams(devices=seed is None)
    if seed is not None:
        seed_host(seed)
    try:
        yield
    finally:
        put_back()


def run_seed() -> int:
    """Returns the seed set by ``seed_everything`` (Lightning keeps it in ``PL_GLOBAL_SEED``), 0 when none was set."""
    text = os.environ.get("PL_GLOBAL_SEED", "0")
    if not text.isdecimal():
        raise FederatedError(
            f"Expected `seed_everything` (PL_GLOBAL_SEED) to be an integer of at least 0, got {text!r}."
        )
    return int(text)
