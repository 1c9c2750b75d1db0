"""Tables, plots and pages are made of the results that are found, and of nothing else."""

import json
import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import figures, peers, scale
from benchmarks.contestants import installed
from benchmarks.environment import peak_memory, resident_memory
from benchmarks.results import median_figures, milliseconds
from benchmarks.tables import GPU_ROWS, ROWS

FOUND = {
    "work": "LeNet", "side": "sequential", "against": "plain", "note": "", "aim": 0.92,
    **median_figures([(1.0, 2.0), (3.0, 2.0), (2.0, 2.5)]),
}  # fmt: skip
SKIPPED = {"work": "LeNet", "side": "two", "against": "plain", "note": "", "aim": 0.5, "skipped": "no second core"}
RESULTS = {
    "machine": {"versions": {"torch": "2"}, "processor": "P", "cores": 2, "gpu": None, "load_average": 0.1},
    "rows": {"A-sequential": FOUND, "A-2": SKIPPED},
    "figures": {"start": {"text": "start", "value": 0.5, "unit": "s", "values": [0.4, 0.6], "aim": 1.5, "note": ""}},
}


def test_medians_are_of_the_ratios_of_pairs() -> None:
    assert FOUND["ratio"] == 0.8
    assert (FOUND["ratio_min"], FOUND["ratio_max"]) == (0.5, 1.5)
    assert (FOUND["seconds"], FOUND["against_seconds"]) == (2.0, 2.0)


@pytest.mark.parametrize(("seconds", "text"), [(0.0415, "41.5 ms"), (0.601, "601 ms"), (12.34, "12.3 s")])
def test_times_are_short(seconds: float, text: str) -> None:
    assert milliseconds(seconds) == text


def test_a_page_gets_the_table_between_its_marks_and_nowhere_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bench: begin -->\nold\n<!-- bench: end -->\nafter\n")
    figures.write_block(page, "bench", figures.docs_text(RESULTS, "ratios.png"))
    text = page.read_text()
    assert text.startswith("before\n<!-- bench: begin -->\n")
    assert text.endswith("<!-- bench: end -->\nafter\n")
    assert "old" not in text
    assert "| A-sequential | sequential 2000 ms | plain 2000 ms | 0.80 × | 0.50 – 1.50 | 0.92 |" in text
    assert "not run: no second core" in text
    assert "| start | 0.50 s | 0.40 – 0.60 | 1.50 s |" in text
    with pytest.raises(ValueError, match="marks of 'other'"):
        figures.write_block(page, "other", "")


def test_the_page_of_the_documentation_has_all_marks() -> None:
    for name in ("bench", "scale", "peers"):
        assert figures.DOCS.read_text().count(f"<!-- {name}: begin -->\n\n") == 1
        assert figures.DOCS.read_text().count(f"<!-- {name}: end -->\n") == 1


def test_a_former_run_is_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(RESULTS))
    figures.show(path, write_docs=False)
    assert "0.80 ×" in capsys.readouterr().out
    assert (tmp_path / "bench-ratios.png").stat().st_size > 1000


def test_a_second_run_stands_beside_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, ratio in (("bench", 0.8), ("again", 0.7)):
        rows = {"A-sequential": {**FOUND, "ratio": ratio}, "A-2": SKIPPED}
        (tmp_path / f"{name}.json").write_text(json.dumps({**RESULTS, "rows": rows}))
    figures.show(tmp_path / "bench.json", write_docs=False, again=tmp_path / "again.json")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| row", "| A-"))]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[0] == ["row", "a round of", "against", "ratio", "from – to", "second run", "aim"]
    assert cells[1][3:] == ["0.80 ×", "0.50 – 1.50", "0.70 ×", "0.92"]
    assert (cells[2][-1], len(cells[2])) == ("", 7)


def test_every_aim_of_a_row_is_a_ratio() -> None:
    assert all(row.aim is None or 0 < row.aim < 2 for row in ROWS + GPU_ROWS)


def test_a_scenario_is_as_flat_as_its_second_half() -> None:
    found = {"seconds": [9.0, 1.0, 1.0, 2.0, 2.0], "bytes": [100, 120, 130, 130, 150], "data_bytes": 60}
    assert scale.summary(found) == {"seconds": 1.5, "drift": 2.0, "growth_bytes": 50, "beyond_data_bytes": 90}


def test_scenarios_run_small_and_are_told(tmp_path: Path) -> None:
    small = scale.Scenario(clients=40, per_round=5, rounds=4, samples=3)
    found = scale.measure(small, None, str(tmp_path))
    assert len(found["seconds"]) == len(found["bytes"]) == 4
    assert found["peak_bytes"] >= found["bytes"][-1] > 0
    scenario = {"text": small.text, "summary": scale.summary(found), **found}
    text = scale.docs_text({"machine": RESULTS["machine"], "scenarios": {"40": scenario}})
    assert "| 40 clients of 3 samples, 5 per round |" in text
    scale.plot({"40": scenario}, tmp_path / "scale.png")
    assert (tmp_path / "scale.png").exists()


def test_how_far_ahead_is_told_for_like_numbers_of_processes() -> None:
    rows = {
        "B-lightning_fed": {"ratio": 0.5}, "B-lightning_fed-sequential": {"ratio": 1.0}, "B-pfl": {"ratio": 2.0},
        "B-pfl-2": {"ratio": 1.5}, "B-lightning_fed-2": {"skipped": "no"}, "B-fedlab": {"failed": "no"},
    }  # fmt: skip
    assert peers.ahead(rows, "B", 1).endswith("lightning_fed: pfl 4.00 x")
    assert peers.ahead(rows, "B", 2).endswith("nothing to compare")
    assert {row.side.loop for row in peers.rows_of("B")} == {"framework", *peers.PEERS}


def test_a_peer_that_cannot_be_installed_is_named_with_the_reason_of_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installed, "_REASONS", tmp_path / "reasons.json")
    monkeypatch.setattr(installed, "PEERS", {"nothing": ("no-such-distribution", "no-such-distribution[x]")})
    assert installed.why_not("nothing") == "not installed: run `make bench-peers`"

    class Refused:
        returncode, stderr = 1, "looking\nERROR: No matching distribution\n"

    monkeypatch.setattr(installed.subprocess, "run", lambda *args, **kwargs: Refused)
    installed.install()
    reason = "pip install 'no-such-distribution[x]' failed: ERROR: No matching distribution"
    assert installed.why_not("nothing") == reason
    assert reason in capsys.readouterr().out


@pytest.mark.slow
def test_the_peak_of_memory_is_not_that_of_the_process_that_started_it() -> None:
    size = 500 * 2**20
    with mmap.mmap(-1, size) as held:  # of the kernel: an allocator may keep what is freed, or have had it free
        held[:: mmap.PAGESIZE] = bytes(size // mmap.PAGESIZE)  # no page counts before it is written to
        before = resident_memory()
        words = "from benchmarks.environment import peak_memory; print(peak_memory())"
        command = [sys.executable, "-c", words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=figures.ROOT)
    assert resident_memory() < before - size // 2
    assert peak_memory() >= before - 2**20 > size  # the kernel counts pages in portions
    assert 0 < int(done.stdout) < before - size // 4
