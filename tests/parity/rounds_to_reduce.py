"""What clients send over three rounds: updates at random, on thresholds, with ties, and none at all."""

from dataclasses import replace

import numpy as np

from tests.parity.rules_by_hand import Round

SIZES = np.array([7, 1, 22, 12, 8])
# Coordinates on a threshold: 28 and 29 of 50 samples, 2 of 5 votes, 1 of 5, and 3/5 of the magnitude; two in which
# nobody differs.
PLANTED = np.array(
    [
        [-0.4, 0.5, 0.3, 0.0, 0.6, 1.0],
        [0.3, 0.0, 0.3, 0.0, 0.0, -0.25],
        [0.9, 0.7, 0.3, 0.0, 0.0, 0.0],
        [0.2, 0.0, 0.3, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.3, 0.0, 0.0, 0.0],
    ]
)


def make_round(rng: np.random.Generator, sizes: np.ndarray, tensors: tuple[int, ...]) -> Round:
    shape = (len(sizes), sum(tensors))
    lean = 0.7 * rng.normal(size=shape[1])
    deltas = (rng.normal(size=shape) + lean) * (rng.random(shape) > 0.15)
    gradients = (rng.normal(size=shape) + 2 * lean) * (rng.random(shape) > 0.15)
    return Round(sizes, deltas, rng.uniform(0.1, 2, shape[0]), gradients, rng.uniform(0.5, 2, shape[0]), tensors)


def plain() -> list[Round]:
    """Five clients that also agree to the bit here and there; one has no gradient, and another time no finite loss."""
    rounds = [make_round(np.random.default_rng(i), SIZES, (15, 8)) for i in range(3)]
    for each in rounds:
        each.deltas[:, 12:18] = PLANTED
        each.deltas[1, 18:] = each.deltas[3, 18:]
        each.deltas[2, 20:] = -each.deltas[0, 20:]
    rounds[1].gradients[1], rounds[2].losses[3] = 0.0, np.inf
    return rounds


def a_still_round() -> list[Round]:
    first, second, third = plain()
    return [first, replace(second, deltas=np.zeros((5, 23))), third]


def still() -> list[Round]:
    return [replace(each, deltas=np.zeros((5, 23)), gradients=np.zeros((5, 23))) for each in plain()]


def whole_numbers() -> list[Round]:
    """Six clients; in the last round three against three, so that every vote cancels and Krum scores come in pairs."""
    found, sizes = [], np.array([3, 1, 4, 2, 9, 6])
    for i in range(3):
        rng = np.random.default_rng(i)
        deltas, gradients = rng.integers(-1, 2, (2, 6, 23)).astype(float)
        found.append(replace(make_round(rng, sizes, (15, 8)), deltas=deltas, gradients=gradients))
    found[-1].deltas[3:] = -found[-1].deltas[:3]
    return found


SHAPES = {
    "plain": plain(),
    "a still round": a_still_round(),
    "still": still(),
    "whole numbers": whole_numbers(),
    "one client": [make_round(np.random.default_rng(i), SIZES[:1], (15, 8)) for i in range(3)],
    "seven clients": [make_round(np.random.default_rng(i + 40), np.array([*SIZES, 3, 15]), (15, 8)) for i in range(3)],
    "one coordinate": [make_round(np.random.default_rng(i + 22), SIZES, (1,)) for i in range(3)],
}


def start_of(shape: str) -> np.ndarray:
    return np.random.default_rng(9).normal(size=sum(SHAPES[shape][0].tensors))
