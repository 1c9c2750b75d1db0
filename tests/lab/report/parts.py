"""Run folders, and runs of which a report is made."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_fed.lab.report.load import Columns, MeasuredRun, Method


def write_run(
    root: Path,
    group: str = "a",
    seed: int = 0,
    values: Sequence[float] | Mapping[int, float] = (),
    *,
    label: str = "FedAvg",
    name: str = "",
    created: float | None = None,
    metric: str = "test/acc",
    text: str | None = None,
) -> Path:
    """Writes a run folder: ``values`` of one metric by round, or the text of the whole metrics.csv."""
    count = len(list(root.rglob("run.json")))
    path = root / "runs" / (name or group) / f"version_{count}"
    path.mkdir(parents=True)
    about = {"fingerprint": f"{group}{seed}", "group": group, "label": label, "name": name, "seed": seed}
    about |= {"wandb_id": "1", "created": count if created is None else created}
    (path / "run.json").write_text(json.dumps(about))
    if text is None:
        by_round = dict(values) if isinstance(values, Mapping) else dict(enumerate(values))
        text = f"round,{metric}\n" + "".join(f"{at},{value}\n" for at, value in by_round.items())
    (path / "metrics.csv").write_text(text)
    return path


def method(label: str, *runs: Columns) -> Method:
    """A method whose seeds measured these columns."""
    facts = {"fingerprint": "f", "group": "g", "label": label, "name": "", "wandb_id": "1", "created": 0.0}
    return Method(
        label, tuple(MeasuredRun(Path(label), seed=seed, columns=run, **facts) for seed, run in enumerate(runs))
    )
