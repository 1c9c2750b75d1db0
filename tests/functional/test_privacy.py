"""ε of published settings, to the digits that were printed, and against the closed form at integer orders."""

import sys
from math import comb, exp, fsum, log

import pytest

from lightning_fed.errors import FederatedError
from lightning_fed.functional import privacy
from lightning_fed.functional.privacy import gaussian_epsilon, gaussian_noise, samples_epsilon, samples_noise

NEEDED = "pip install 'lightning_fed[privacy]'"

# Where it was published, with what is printed there; z, q, rounds, δ; and ε by RDP as it is converted today.
PUBLISHED = {
    "TensorFlow Privacy's test, 0.7242234026": (1.3, 150 / 60000, 6000, 1e-5, 0.7242234026),
    "TensorFlow Privacy's test, 1.4154988495": (1.0, 1e-3, 30000, 1e-7, 1.4154988495),
    "TensorFlow Privacy's tutorial, 2.92": (1.12, 256 / 60000, 14063, 1e-5, 2.52),
    "TensorFlow Privacy's tutorial, 9.74": (0.6, 256 / 60000, 7032, 1e-5, 8.78),
    "TensorFlow Privacy's tutorial, 1.20": (1.2, 256 / 60000, 2344, 1e-5, 0.93),
    "Bu et al. 2020, 1.34": (1.3, 256 / 60000, 4688, 1e-5, 1.11),
    "Bu et al. 2020, 8.68": (0.7, 256 / 60000, 16407, 1e-5, 7.84),
    "opacus, 0.71": (1.3, 0.004, 250, 1e-5, 0.48),
    "opacus, 1.18": (1.3, 0.004, 3750, 1e-5, 0.92),
    "TensorFlow Federated's tutorial, 2": (1.2, 120 / 3383, 100, 1e-5, 1.986),
    "McMahan et al. 2018, 4.634": (1.0, 5000 / 763430, 5000, 1e-9, 4.18),
    "Abadi et al. 2016, 1.26": (4.0, 0.01, 10000, 1e-5, 1.04),
}


def by_hand(z: float, q: float, rounds: int, delta: float, former: bool) -> float:
    """ε at integer orders, by the binomial formula (Mironov et al., 2019, section 3.3), with a former conversion."""
    found = []
    for a in range(2, 65):
        logs = [log(comb(a, k)) + k * log(q) + (a - k) * log(1 - q) + k * (k - 1) / (2 * z * z) for k in range(a + 1)]
        most = max(logs)
        rdp = rounds * (most + log(fsum(exp(each - most) for each in logs))) / (a - 1)
        canonne = rdp + log((a - 1) / a) - (log(delta) + log(a)) / (a - 1)
        found.append(rdp + log(1 / delta) / (a - 1) if former else canonne)
    return min(found)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings_to_the_digits_that_are_printed(name: str) -> None:
    pytest.importorskip("dp_accounting", reason=NEEDED)
    *setting, expected = PUBLISHED[name]
    digits = len(str(expected).partition(".")[2])
    found = gaussian_epsilon(*setting)
    assert round(found, digits) == expected
    assert 0.96 * by_hand(*setting, former=False) < found <= by_hand(*setting, former=False) + 1e-9


@pytest.mark.parametrize(
    ("name", "expected"), [("McMahan et al. 2018, 4.634", 4.634), ("Abadi et al. 2016, 1.26", 1.259)]
)
def test_the_settings_are_those_that_were_published(name: str, expected: float) -> None:
    """By the conversion of then, at integer orders, they have the ε of then."""
    *setting, _ = PUBLISHED[name]
    assert round(by_hand(*setting, former=True), 3) == expected


@pytest.mark.slow
def test_noise_is_the_least_for_an_epsilon() -> None:
    pytest.importorskip("dp_accounting", reason=NEEDED)
    setting = (100 / 3400, 1000, 1e-5)
    z = gaussian_noise(8.0, *setting)
    assert round(z, 3) == 0.911
    assert gaussian_epsilon(z, *setting) <= 8.0 < gaussian_epsilon(z - 1e-4, *setting)
    assert gaussian_epsilon(1.0, 0.5, 0, 1e-5) == 0.0
    with pytest.raises(FederatedError, match="Expected `epsilon` to be one that noise can give after 10 rounds"):
        gaussian_noise(1e12, 0.5, 10, 1e-5)


@pytest.mark.parametrize(("most", "expected"), [(72, 6.54), (25, 6.54), (20, 7.25), (12, 16.6)])
@pytest.mark.quick(2)
def test_epsilon_of_samples_counts_batches_that_are_cut(most: int, expected: float) -> None:
    """At n = 72, B = 10, z = 1 and 42 steps; uncut it is that of Poisson batches, in another way."""
    dp = pytest.importorskip("dp_accounting", reason=NEEDED)
    found = samples_epsilon({(72, 42)}, 1.0, 10, most, 1e-5)
    assert round(found, 1 if most == 12 else 2) == expected
    poisson = dp.PoissonSampledDpEvent(10 / 72, dp.GaussianDpEvent(1.0))
    uncut = dp.pld.PLDAccountant().compose(poisson, 42).get_epsilon(1e-5)
    assert (found == pytest.approx(uncut, abs=1e-6)) == (most == 72)
    assert found >= uncut - 1e-6


def test_the_largest_epsilon_of_samples_is_not_always_that_of_the_fewest_samples() -> None:
    pytest.importorskip("dp_accounting", reason=NEEDED)
    each = {pair: samples_epsilon({pair}, 3.0, 10, 12, 1e-5) for pair in ((12, 42), (15, 42), (72, 42), (15, 40))}
    assert max(each, key=each.__getitem__) == (15, 42)
    assert samples_epsilon(each, 3.0, 10, 12, 1e-5) == each[15, 42]
    assert samples_epsilon({(12, 0)}, 3.0, 10, 12, 1e-5) == 0.0


def test_epsilon_of_samples_without_sampling_is_that_of_the_gaussian_mechanism() -> None:
    """n ≤ B: every sample is in every batch. Below z = 0.3 no sampling is counted, which costs more."""
    pytest.importorskip("dp_accounting", reason=NEEDED)
    found = samples_epsilon({(8, 10)}, 2.0, 8, 16, 1e-5)
    assert 0.85 * gaussian_epsilon(2.0, 1.0, 10, 1e-5) < found < gaussian_epsilon(2.0, 1.0, 10, 1e-5)  # pld is tighter
    assert samples_epsilon({(100, 10)}, 0.29, 8, 16, 1e-5) == gaussian_epsilon(0.145, 1.0, 10, 1e-5)


@pytest.mark.slow
def test_noise_of_samples_is_the_least_for_the_worst_client() -> None:
    pytest.importorskip("dp_accounting", reason=NEEDED)
    trained = {(72, 42), (40, 24)}
    z = samples_noise(trained, 6.0, 10, 25, 1e-5)
    assert samples_epsilon(trained, z, 10, 25, 1e-5) <= 6.0 < samples_epsilon(trained, 0.985 * z, 10, 25, 1e-5)
    with pytest.raises(FederatedError, match="Expected `epsilon` to be one that noise can give, got 1e-30"):
        samples_noise(trained, 1e-30, 10, 25, 1e-5)


def test_nothing_of_what_the_package_leaves_out_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("dp_accounting", reason=NEEDED)
    assert gaussian_epsilon(0.3, 0.03, 100, 1e-5) > 10
    assert capfd.readouterr().err == ""


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    privacy._library.cache_clear()
    with pytest.raises(FederatedError, match=r"pip install 'lightning_fed\[privacy\]'"):
        gaussian_epsilon(1.0, 0.5, 1, 1e-5)
