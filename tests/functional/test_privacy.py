"""ε of published settings, to the digits that were printed, and against the closed form at integer orders."""

import sys
from math import comb, exp, fsum, log

import pytest

from lightning_fed.errors import FederatedError
from lightning_fed.functional import privacy
from lightning_fed.functional.privacy import gaussian_epsilon, gaussian_noise

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


def test_noise_is_the_least_for_an_epsilon() -> None:
    pytest.importorskip("dp_accounting", reason=NEEDED)
    setting = (100 / 3400, 1000, 1e-5)
    z = gaussian_noise(8.0, *setting)
    assert round(z, 3) == 0.911
    assert gaussian_epsilon(z, *setting) <= 8.0 < gaussian_epsilon(z - 1e-4, *setting)
    assert gaussian_epsilon(1.0, 0.5, 0, 1e-5) == 0.0
    with pytest.raises(FederatedError, match="Expected `epsilon` to be one that noise can give after 10 rounds"):
        gaussian_noise(1e12, 0.5, 10, 1e-5)


def test_nothing_of_what_the_package_leaves_out_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("dp_accounting", reason=NEEDED)
    assert gaussian_epsilon(0.3, 0.03, 100, 1e-5) > 10
    assert capfd.readouterr().err == ""


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    privacy._library.cache_clear()
    with pytest.raises(FederatedError, match=r"pip install 'lightning_fed\[privacy\]'"):
        gaussian_epsilon(1.0, 0.5, 1, 1e-5)
