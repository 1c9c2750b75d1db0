import json
from collections.abc import Callable
from pathlib import Path

import pytest

WriteRun = Callable[..., Path]


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """Writes a run folder: `values` of one metric by round, or the text of the whole metrics.csv."""
    count = 0

    def write(
        group="a", seed=0, values=(), *, label="FedAvg", name="", created=None, metric="test/acc", text=None
    ) -> Path:
        nonlocal count
        path = tmp_path / "runs" / (name or group) / f"version_{count}"
        path.mkdir(parents=True)
        about = {"fingerprint": f"{group}{seed}", "group": group, "label": label, "name": name, "seed": seed}
        about |= {"wandb_id": None, "created": created or f"2030-01-01T00:00:{count:02d}+00:00"}
        (path / "run.json").write_text(json.dumps(about))
        if text is None:
            values = dict(values) if isinstance(values, dict) else dict(enumerate(values))
            text = f"round,{metric}\n" + "".join(f"{at},{value}\n" for at, value in values.items())
        (path / "metrics.csv").write_text(text)
        count += 1
        return path

    return write
