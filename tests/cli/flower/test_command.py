"""`flower new` writes what `flwr run` takes, and `flower node` answers packets; neither loads Flower."""

import re
import stat
import subprocess
import sys
from multiprocessing.connection import Client
from pathlib import Path

import pytest

from lightning_fed.cli import main
from lightning_fed.cli.flower.command import _numbers
from lightning_fed.engines.fleet.packets import pack, unpack
from lightning_fed.errors import FederatedError

WORDS = ["--config", "quickstart", "--trainer.max_rounds", "2"]


def run(*words: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["flower", *words])
    assert end.value.code == 0


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["flower", *words])
    assert end.value.code
    return capsys.readouterr().err


def test_an_app_has_the_options_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run("new", "digits", *WORDS, "--aggregator", "FedYogi", "--aggregator.lr", "0.1")
    project = (tmp_path / "digits" / "pyproject.toml").read_text()
    assert 'name = "digits"' in project
    assert "NAME" not in project
    assert "dependencies = []" in project  # nothing is fetched at the start of a run
    assert "FLWR_TELEMETRY_ENABLED=0" in (tmp_path / "digits" / "flower.env").read_text()
    for part in ("client", "server"):
        assert re.search(rf"(?m)^{part} = ", (tmp_path / "digits" / "app.py").read_text())
    main(["fit", "--config", "digits/config.yaml", "--trainer.name", "run", "--trainer.enable_progress_bar", "false"])
    assert "FedYogi" in (tmp_path / "runs" / "run" / "version_0" / "config.yaml").read_text()


@pytest.mark.slow
def test_a_worker_answers_beside_what_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_fed", "flower"]
    subprocess.run([*command, "new", "digits", *WORDS], cwd=tmp_path, check=True, capture_output=True)
    words = [*command, "node", "digits", "--clients", "0:3,7"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout is not None
            assert next(line for line in worker.stdout if line.startswith("ready for digits"))
            place = tmp_path / "digits" / "worker.sock"
            assert stat.S_IMODE(place.stat().st_mode) & 0o077 == 0  # of the same user alone
            with Client(str(place)):
                pass  # an app that was ended before it said anything
            for packet, expected in ((b"", "clients"), (pack({"kind": "train", "ticket": "x"}, {}), "error")):
                with Client(str(place)) as line:
                    line.send_bytes(packet)
                    facts = unpack(line.recv_bytes())[0]
                assert expected in facts
            again = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
            assert "Expected one worker" in again.stderr
        finally:
            worker.kill()


def test_a_client_app_loads_nothing_heavy() -> None:
    """Flower starts one for each message."""
    code = "import sys, lightning_fed.cli.flower.apps; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "lightning", "numpy", "jsonargparse"} & set(done.stdout.split())


@pytest.mark.parametrize(("words", "said"), [
    ((), "Expected `flower new FOLDER`"), (("start", "app"), "Expected `flower new FOLDER`"),
    (("new", "--config"), "Expected `flower new FOLDER`"), (("new", "a b"), "Expected a folder named by letters"),
    (("new", "."), "Expected a new folder"), (("node", "none", "--clients", "0"), "none/config.yaml"),
])  # fmt: skip
def test_a_mistake_is_one_sentence(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    lines = refused(capsys, *words).strip().splitlines()
    assert said in lines[-1], lines


def test_numbers_and_ranges_of_clients() -> None:
    assert _numbers("0:3, 7,9:10") == [0, 1, 2, 7, 9]
    for wrong in (None, "", "a", "3-5", "1,,2"):
        with pytest.raises(FederatedError, match="such as 0:5,7"):
            _numbers(wrong)
