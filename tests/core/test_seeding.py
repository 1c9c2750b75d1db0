"""Seeds depend on (seed, purpose, round, client) and on nothing else."""

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import torch

from lightning_fed.core import devices
from lightning_fed.core.seeding import (
    Purpose,
    generator_for,
    isolated_streams,
    numpy_generator_for,
    run_seed,
    seed_everywhere,
    seed_for,
    seeds_for,
)
from lightning_fed.errors import FederatedError

# Values of the first release: a change here changes the numbers of every run there has been.
KNOWN = {
    (0, Purpose.SPLIT, 0, 0): 7896617691693857887,
    (0, Purpose.SHUFFLE, 1, 2): 5975187269406873824,
    (42, Purpose.LOCAL, 200, 99): 7953329676128479599,
    (2**40, Purpose.PREDICT, 0, 0): 8019228281482454039,
}
SNIPPET = "from lightning_fed.core.seeding import *; print([seed_for({}, p, 3, 4) for p in Purpose], hash('a'))"


@pytest.mark.parametrize("place", KNOWN, ids=str)
def test_seeds_are_those_of_the_first_release(place: tuple[int, Purpose, int, int]) -> None:
    assert seed_for(*place) == KNOWN[place]


@pytest.mark.parametrize("index", [None, 0, 2**32 + 1])
@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1, 2**32, 2**64 + 3])
@pytest.mark.parametrize("client", [0, 1, 2**31, 2**32 - 1, 2**32])
def test_seeds_are_those_of_a_seed_sequence(seed: int, client: int, index: int | None) -> None:
    numbers = [seed, Purpose.LOCAL, 3, client, *([] if index is None else [index])]
    low, high = np.random.SeedSequence([int(number) for number in numbers]).generate_state(2)
    expected = seed_for(seed, Purpose.LOCAL, 3, client, index)
    assert expected == (int(high) << 32 | int(low)) >> 1
    assert index is not None or seeds_for(seed, Purpose.LOCAL, 3, [client, client]) == [expected, expected]


def test_purposes_keep_their_numbers() -> None:
    names = ["SPLIT", "SAMPLE", "SHUFFLE", "LOCAL", "EVALUATE", "PREDICT", "GRADIENT", "ROUND", "READ", "SKEW"]
    names += ["AUGMENT", "AVAILABLE", "SPEED", "WORK", "MASK", "SERVER", "TUNE", "PAYLOAD", "NOISE"]
    assert [(p.name, p.value) for p in Purpose] == [(name, i) for i, name in enumerate(names)]


def test_seeds_differ_by_seed_purpose_round_and_client() -> None:
    places = list(itertools.product((0, 1, 2**32, 2**32 + 1), Purpose, range(12), range(12)))
    seeds = [seed_for(*place) for place in places]
    assert len(set(seeds)) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_streams_differ_too_and_torch_agrees_with_numpy_on_none_of_them() -> None:
    places = list(itertools.product((0, 7), Purpose, range(4), range(4)))
    permutations = {tuple(torch.randperm(50, generator=generator_for(*place)).tolist()) for place in places}
    permutations |= {tuple(numpy_generator_for(*place).permutation(50).tolist()) for place in places}
    assert len(permutations) == 2 * len(places)


def test_global_state_is_neither_read_nor_changed() -> None:
    seed_everywhere(5)
    first = seed_for(1, Purpose.LOCAL, 2, 3), generator_for(1, Purpose.SHUFFLE).initial_seed()
    before = random.random(), np.random.rand(), torch.rand(1).item()
    seed_everywhere(6)
    assert (seed_for(1, Purpose.LOCAL, 2, 3), generator_for(1, Purpose.SHUFFLE).initial_seed()) == first
    seed_everywhere(5)
    torch.rand(3, generator=generator_for(9, Purpose.LOCAL))
    numpy_generator_for(9, Purpose.LOCAL).random(3)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == before


def test_seed_everywhere_takes_any_derived_seed() -> None:
    seed_everywhere(2**63 - 1)
    first = random.random(), np.random.rand(), torch.rand(1).item()
    seed_everywhere(2**63 - 2)
    second = random.random(), np.random.rand(), torch.rand(1).item()
    assert all(a != b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("seed", [0, 7, 2**40 + 3])
def test_seed_everywhere_seeds_torch_as_manual_seed_does(seed: int) -> None:
    torch.manual_seed(seed)
    expected = torch.rand(5)
    seed_everywhere(seed)
    assert torch.equal(torch.rand(5), expected)


@pytest.mark.slow
def test_seeds_do_not_depend_on_pythons_hashes() -> None:
    seed = 11
    command = [sys.executable, "-c", SNIPPET.format(seed)]
    env = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
    found = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()
    expected = str([seed_for(seed, p, 3, 4) for p in Purpose])
    assert found.startswith(expected)
    assert found != f"{expected} {hash('a')}", "the other process must have other hashes"


def test_run_seed_is_the_one_that_lightning_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert run_seed() == 0
    monkeypatch.setenv("PL_GLOBAL_SEED", "42")
    assert run_seed() == 42


@pytest.mark.parametrize("text", ["-1", "x", "1.5", "", "²"])
def test_a_bad_run_seed_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", text)
    with pytest.raises(FederatedError, match="seed_everything"):
        run_seed()


@pytest.mark.parametrize("seed", [None, 3])
def test_isolated_streams_are_put_back_whatever_happens(seed: int | None) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    seed_everywhere(5)
    expected = draw()
    seed_everywhere(5)
    found = []
    for _ in range(2):
        with suppress(ZeroDivisionError), isolated_streams(seed):
            found.append(draw())
            raise ZeroDivisionError
    assert found[0] == found[1]
    assert (found[0] == expected) == (seed is None)
    assert draw() == expected


@pytest.mark.parametrize("before", range(3))
@pytest.mark.parametrize("inside", range(4))
def test_the_second_of_a_pair_of_normal_numbers_is_put_back_too(before: int, inside: int) -> None:
    seed_everywhere(5)
    expected = np.random.randn(before + 3)[before:]
    seed_everywhere(5)
    np.random.randn(before)
    for _ in range(2):
        with isolated_streams():
            np.random.randn(inside)
    assert np.random.randn(3) == pytest.approx(expected, abs=0)


def test_a_kept_normal_number_is_not_put_back_once_it_is_drawn() -> None:
    seed_everywhere(5)
    expected = np.random.randn(4)
    seed_everywhere(5)
    found = []
    for _ in expected:
        with isolated_streams():
            pass
        found.append(np.random.randn())
    assert found == list(expected)


def test_the_same_words_may_come_with_another_kept_number() -> None:
    seed = next(s for s in range(9) if _words_after(s, np.random.rand, 2) == _words_after(s, np.random.randn, 1))
    seed_everywhere(seed)
    np.random.rand(2)
    with isolated_streams():
        pass
    seed_everywhere(seed)
    np.random.randn(1)
    with isolated_streams():
        expected = np.random.randn(1)
    assert np.random.randn(1) == expected


def _words_after(seed: int, draw: Callable[[int], object], count: int) -> tuple[bytes, int]:
    np.random.seed(seed)
    draw(count)
    return np.random.get_state()[1].tobytes(), np.random.get_state()[2]


def test_a_generator_that_the_user_has_put_in_numpys_place_is_put_back() -> None:
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.MT19937(1))
    try:
        with isolated_streams():
            first = np.random.rand()
        np.random.set_bit_generator(np.random.MT19937(2))
        with isolated_streams():
            other = np.random.rand()
        assert (np.random.rand(), first) == (other, np.random.RandomState(np.random.MT19937(1)).rand())
    finally:
        np.random.set_bit_generator(usual)


class Stream:
    """The random streams of a device that this machine need not have, as torch's module of its kind offers them."""

    def __init__(self, of_many: bool) -> None:
        self.states = [torch.zeros(1, dtype=torch.uint8)]
        self.used = False
        if of_many:  # as CUDA and XPU; MPS has one, and does not say whether it is in use
            self.is_initialized = lambda: self.used
            self.manual_seed_all, self.get_rng_state_all = self.manual_seed, lambda: list(self.states)
            self.set_rng_state_all = lambda states: setattr(self, "states", states)
        else:
            self.is_available = lambda: self.used
            self.get_rng_state, self.set_rng_state = lambda: self.states[0], lambda state: self.draw(int(state))

    def manual_seed(self, seed: int) -> None:
        assert self.used, "what nobody uses is not to be started"
        self.draw(seed)

    def draw(self, number: int) -> None:
        self.states = [torch.tensor([number], dtype=torch.uint8)]


@pytest.mark.parametrize("of_many", [True, False])
def test_streams_of_any_device_are_seeded_and_put_back(monkeypatch: pytest.MonkeyPatch, of_many: bool) -> None:
    stream = Stream(of_many)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: stream)
    devices._accelerator.cache_clear()
    try:
        seed_everywhere(3)
        with isolated_streams():
            pass
        assert stream.states[0].item() == 0
        stream.used = True
        seed_everywhere(4)
        assert stream.states[0].item() == 4
        with isolated_streams():
            stream.draw(5)
        assert stream.states[0].item() == 4
        with isolated_streams(9):
            assert stream.states[0].item() == 4
    finally:
        devices._accelerator.cache_clear()
