"""Strategies that the tests of masks draw from."""

from fractions import Fraction

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

TENTHS = [Fraction(i, 10) for i in range(11)]
thresholds = st.sampled_from([float(t) for t in TENTHS]) | st.floats(0, 1)
# Subnormal updates are left out: torch may flush them to zero, which is not the formula's business.
values = st.just(0.0) | st.floats(-1e3, 1e3, allow_subnormal=False)


@st.composite
def cohorts(draw: st.DrawFn, min_clients: int = 1, elements: st.SearchStrategy[float] = values) -> np.ndarray:
    """Updates δ of n clients, shape (n, d), float64."""
    shape = (draw(st.integers(min_clients, 7)), draw(st.integers(1, 5)))
    return draw(arrays(np.float64, shape, elements=elements))
