import math

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from lightning_fed.core.logged_values import TOTALS
from lightning_fed.errors import FederatedError
from lightning_fed.lab.report.plots import curve, limits, panels_figure
from lightning_fed.lab.report.runs import COSTS, Method
from tests.lab.report.parts import method


def panel(methods: list[Method], metric: str, x: str = "round") -> Axes:
    (axes,) = panels_figure({("", metric): dict(enumerate(methods))}, x).axes
    return axes


def test_curve_by_hand_over_common_rounds() -> None:
    two = method("A", {"acc": {0: 0.1, 2: 0.5, 4: 0.9}}, {"acc": {0: 0.3, 1: 0.8, 2: 0.5}})
    x, mean, std = curve(two, "acc")
    assert x.tolist() == [0, 2]
    np.testing.assert_allclose(mean, [0.2, 0.5])
    np.testing.assert_allclose(std, [0.2 / math.sqrt(2), 0])
    x, mean, std = curve(method("A", {"acc": {0: 0.1, 2: 0.5}}), "acc")
    assert mean.tolist() == [0.1, 0.5]
    assert std is None


def test_x_of_time_accumulates_and_of_counts_stands_still() -> None:
    columns = {"acc": {0: 0.1, 2: 0.2, 5: 0.3}, "time/round": {1: 1.0, 2: 2.0, 3: 4.0}, "comm/rounds": {2: 7.0, 5: 9.0}}
    slower = columns | {"time/round": {1: 3.0, 2: 2.0, 3: 4.0}}
    both = method("A", columns, slower)
    assert curve(both, "acc", "time")[0].tolist() == [0, (3 + 5) / 2, (7 + 9) / 2]
    assert curve(both, "acc", "comm/rounds")[0].tolist() == [0, 7, 9]
    with pytest.raises(FederatedError, match=r"--x.*'comm/bytes_up'"):
        curve(both, "acc", "comm/bytes_up")


def test_x_of_both_ways_is_the_sum_of_each() -> None:
    down, up = {1: 100.0, 2: 200.0, 5: 300.0}, {1: 40.0, 2: 80.0, 5: 120.0}
    both = method("A", {"acc": {0: 0.1, 3: 0.2, 5: 0.3}, "comm/bytes_down": down, "comm/bytes_up": up})
    assert curve(both, "acc", "comm/bytes")[0].tolist() == [0, 280, 420]
    assert curve(both, "acc", "comm/bytes_up")[0].tolist() == [0, 80, 120]
    half = method("B", {"acc": {0: 0.1}, "comm/bytes_down": down})
    with pytest.raises(FederatedError, match=r"--x.*'comm/bytes', missing"):
        curve(half, "acc", "comm/bytes")


@pytest.mark.parametrize(
    ("x", "label", "ticks"),
    [
        ("gradients", "gradient evaluations, samples", ["0", "2 M"]),
        ("samples", "training samples seen", ["0", "2 M"]),
        ("comm/rounds", "communication rounds", []),
        ("comm/bytes_up", "sent by the clients", ["0 B", "2 MB"]),
        ("comm/bytes_down", "sent to the clients", ["0 B", "2 MB"]),
        ("comm/bytes", "sent both ways", ["0 B", "2 MB"]),
    ],
)
def test_every_total_is_an_axis_of_its_own(x: str, label: str, ticks: list[str]) -> None:
    columns = dict.fromkeys(TOTALS, {1: 0.5e6, 4: 2e6})
    axes = panel([method("A", {"acc": {0: 0.1, 2: 0.2, 4: 0.3}, **columns})], "acc", x)
    factor = 2 if x == "comm/bytes" else 1
    assert axes.lines[0].get_xdata().tolist() == [0, factor * 0.5e6, factor * 2e6]
    assert (axes.get_xlabel(), axes.get_ylabel()) == (label, "acc (%)")
    if ticks:
        assert [axes.xaxis.get_major_formatter()(value) for value in (0, 2e6)] == ticks


def test_every_total_of_a_run_has_a_label() -> None:
    assert {*TOTALS} <= set(COSTS)


def test_picture_has_a_line_and_a_visible_band_for_each_method() -> None:
    acc = {at: 0.5 + at / 100 for at in range(30)}
    low = {at: value - 0.1 for at, value in acc.items()}
    methods = [method("A", {"acc": acc}, {"acc": low}), method("B", {"acc": acc})]
    axes = panel(methods, "acc")
    labels = {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
    assert list(labels) == ["A (2 seeds)", "B (1 seed)"]
    np.testing.assert_allclose(labels["B (1 seed)"].get_ydata(), [100 * value for value in acc.values()])
    (band,) = axes.collections
    assert band.get_alpha() >= 0.2
    extent = band.get_paths()[0].get_extents()
    half = 100 * 0.1 / math.sqrt(2)
    assert extent.y0 == pytest.approx(45 - half)
    assert extent.y1 == pytest.approx(74 + half)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("round", "acc (%)")


def test_many_methods_never_look_alike() -> None:
    methods = [method(str(i), {"val/loss": dict.fromkeys(range(30), float(i))}) for i in range(20)]
    axes = panel(methods, "val/loss")
    assert len({(to_hex(line.get_color()), line.get_linestyle()) for line in axes.lines}) == 20
    assert axes.get_ylabel() == "val/loss"


def test_what_is_measured_once_is_a_point_with_its_deviation() -> None:
    """An axis of rounds would go from 14.4 to 15.6."""
    methods = [method("A", {"acc": {15: 0.5}}, {"acc": {15: 0.6}}), method("B", {"acc": {15: 0.58}})]
    axes = panel(methods, "acc")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("acc (%)", "")
    # From 55 - 7.07 to 55 + 7.07, of which the middle is 55: 20 points around it, and 2 of room at either side.
    assert axes.get_xlim() == pytest.approx((43, 67))
    points, labels = axes.get_legend_handles_labels()
    assert labels == ["A (2 seeds)", "B (1 seed)"]
    assert points[0].lines[0].get_xdata().tolist() == pytest.approx([55])
    (error,) = points[0].lines[2][0].get_segments()
    assert error[:, 0].tolist() == pytest.approx([55 - 10 / math.sqrt(2), 55 + 10 / math.sqrt(2)])
    assert points[0].lines[0].get_color() != points[1].lines[0].get_color()


@pytest.mark.parametrize(
    ("values", "share", "ends"),
    [
        ([0.5, 0.52], True, (0.39, 0.63)),
        ([0.2, 0.9], True, (0.18, 0.92)),
        ([0.99], True, (0.87, 1.0)),
        ([0.0], True, (0.0, 0.12)),
        ([2.0, 2.1], False, (0.0, 2.105)),
        ([-1.0, 1.0], False, (-1.1, 1.1)),
        ([0.0], False, (-1.0, 1.0)),
        ([math.nan], False, (-1.0, 1.0)),
    ],
)
def test_an_axis_of_points_does_not_blow_up_small_differences(values, share, ends) -> None:
    curves = [(np.array([1.0]), np.array([value]), None) for value in values]
    assert limits(curves, share) == pytest.approx(ends)
