"""The rows of the benchmark: what is timed against what, and the ratio to reach."""

from dataclasses import dataclass, replace

from benchmarks.contestants.contestant import PLAIN, PLAIN_FAST, PLAIN_TIGHT, Contestant

__all__ = ["GPU_ROWS", "ROWS", "Row"]

DEFAULT = Contestant()
SEQUENTIAL = Contestant(engine="sequential", memory_format="preserve")
VECTORIZED = replace(SEQUENTIAL, engine="vectorized")
CHANNELS_LAST = replace(SEQUENTIAL, memory_format="channels_last")


@dataclass(frozen=True)
class Row:
    """One ratio: seconds for a round of a side over those of another.

    Attributes:
        key: Its short name, for ``--rows``.
        work: Key of the work.
        side: What is measured.
        against: What it is measured against.
        aim: The largest ratio that is good; None where there is no aim.
        note: What else is to be known of the row.
    """

    key: str
    work: str
    side: Contestant
    against: Contestant = PLAIN
    aim: float | None = None
    note: str = ""


def _method(name: str, aim: float | None = None, note: str = "") -> Row:
    side = replace(SEQUENTIAL, method=name)
    return Row(f"A-{name}", "A", side, SEQUENTIAL, aim, note)


EVALUATIONS = ("global-of-10", "trained", "tuned-of-10", "fedper+own-of-10")
AT_THE_CLIENT = (
    "fedper",
    "ditto",
    "pfedme",
    "apfl",
    "per-fedavg",
    "fedlc",
    "moon",
    "fedntd",
    "fedsam",
    "mimelite",
    "fedcm",
)
RULES = (
    "sand-mask", "signmajority", "ties", "pcgrad", "fedfv", "fedmgda", "fedomg", "fedexp", "qfedavg", "term", "cgw",
    "fedgma", "coordinatemedian", "bulyan", "fedavgm", "fedacg", "fedadam",
)  # fmt: skip

ROWS = [
    Row("A-plain", "A", PLAIN, note="control: how far two equal sides are apart"),
    Row("A-sequential", "A", SEQUENTIAL, aim=0.92),
    Row("A-channels-last", "A", CHANNELS_LAST, aim=0.92),
    Row("A-channels-last-fast", "A", CHANNELS_LAST, PLAIN_FAST, 1.02),
    Row("A-vectorized", "A", VECTORIZED),
    Row("A-2", "A", replace(SEQUENTIAL, devices=2), aim=0.52),
    Row("A-2-channels-last", "A", replace(CHANNELS_LAST, devices=2), aim=0.52),
    Row("B-plain", "B", PLAIN, note="control"),
    Row("B-vectorized", "B", VECTORIZED, aim=0.40),
    Row("B-sequential", "B", SEQUENTIAL, aim=1.15),
    Row("B-sequential-fast", "B", SEQUENTIAL, PLAIN_FAST),
    Row("B-2", "B", replace(VECTORIZED, devices=2), aim=0.25),
    Row("C-sequential", "C", SEQUENTIAL, aim=1.02),
    Row("C-channels-last-fast", "C", CHANNELS_LAST, PLAIN_FAST, 1.02),
    Row("C-2", "C", replace(SEQUENTIAL, devices=2), aim=0.55),
    Row("C-2-channels-last", "C", replace(CHANNELS_LAST, devices=2), aim=0.55),
    Row("A-seq-tight", "A", SEQUENTIAL, PLAIN_TIGHT),
    Row("A-tight", "A", DEFAULT, PLAIN_TIGHT, 0.92),
    Row("A-2-tight", "A", replace(DEFAULT, devices=2), PLAIN_TIGHT, 0.55),
    Row("A-channels-last-tight", "A", CHANNELS_LAST, PLAIN_TIGHT),
    Row("B-tight", "B", DEFAULT, PLAIN_TIGHT, 0.45),
    Row("B-sequential-tight", "B", SEQUENTIAL, PLAIN_TIGHT, 1.4),
    Row("C-tight", "C", DEFAULT, PLAIN_TIGHT, 1.02),
    _method("agreement", note="measured in every round"),
    _method("geometry", note="measured in every round"),
    _method("dissimilarity", note="measured in every round: a pass over the clients' data"),
    _method("each-client", note="all clients evaluated in every round"),
    _method("gma", 1.02),
    _method("fedyogi+gma", 1.02),
    _method("scaffold", 1.08),
    _method("fedprox", 1.08),
    _method("fedga", 1.08, "without its exchange of gradients"),
    *(_method(name, note="10 clients of 600 images evaluated in every round") for name in EVALUATIONS),
    *(_method(name) for name in (*AT_THE_CLIENT, *RULES)),
]

_GPU, _GPU_BF16 = (Contestant("plain", accelerator="gpu", precision=p) for p in ("32-true", "bf16-mixed"))
GPU_ROWS = [
    Row("A-gpu", "A", Contestant(accelerator="gpu"), _GPU, 0.2),
    Row("B-gpu", "B", Contestant(accelerator="gpu"), _GPU, 0.2),
    Row("D-gpu", "D", Contestant(accelerator="gpu"), _GPU, 0.2),
    Row("C-gpu", "C", Contestant(accelerator="gpu", precision="bf16-mixed"), _GPU_BF16, 0.9),
]
