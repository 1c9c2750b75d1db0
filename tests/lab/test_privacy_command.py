"""The command that plans ε."""

import subprocess
import sys

import pytest

from lightning_fed.errors import FederatedError
from lightning_fed.lab.privacy_command import main

PLAN = ["--clients", "3400", "--per_round", "100", "--rounds", "1000", "--delta", "1e-5"]


@pytest.fixture(autouse=True)
def _library() -> None:
    pytest.importorskip("dp_accounting", reason="pip install 'lightning_fed[privacy]'")


@pytest.mark.parametrize("words", [["--epsilon", "8"], ["--noise", "0.9114"]])
def test_noise_and_epsilon_are_found_from_each_other(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, *words]) == 0
    said = capsys.readouterr().out
    assert said.startswith("noise 0.9114: ε = 7.999 at δ = 1e-05 after 1000 rounds of 100 of 3400 clients")
    assert "--trainer.callbacks CentralDP --trainer.callbacks.noise 0.9114" in said


def test_local_noise_is_twice_that_of_the_plain_mechanism(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--local", "--rounds", "10", "--delta", "1e-5", "--noise", "8"])
    local = capsys.readouterr().out
    main(["--rounds", "10", "--delta", "1e-5", "--noise", "4"])  # of 1 client of 1
    assert local.split()[4] == capsys.readouterr().out.split()[4]
    assert "LocalDP" in local


@pytest.mark.slow
def test_noise_of_local_steps_is_found_by_the_accountant_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["--samples", "72", "--local_steps", "7", "--rounds", "6", "--delta", "1e-5"]
    main([*plan, "--noise", "1"])
    said = capsys.readouterr().out
    assert said.startswith("noise 1: ε = 6.54 at δ = 1e-05 after 6 rounds of 7 steps of a client of 72 samples, by PLD")
    assert "--client DPSGD --data.batch_size 10 --trainer.local_steps 7 --client.noise 1 --client.delta 1e-05" in said
    main([*plan, "--epsilon", "6.6"])
    _, noise, _, _, epsilon, *_ = capsys.readouterr().out.split()
    assert 0.98 < float(noise[:-1]) < 1.01
    assert 6.4 < float(epsilon) <= 6.6
    main(["--samples", "72", "--rounds", "2", "--delta", "1e-5", "--noise", "0.2"])
    assert "rounds of 8 steps of a client of 72 samples, by RDP" in capsys.readouterr().out  # an epoch, of little noise


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*PLAN, "--epsilon", "8", "--per_round", "3401"], "`--per_round` to be at most `--clients`, got 3401 of 3400"),
        ([*PLAN, "--epsilon", "0"], "`--epsilon` to be a finite number above 0"),
        ([*PLAN, "--noise", "-1"], "`--noise` to be a finite number above 0"),
        ([*PLAN, "--noise", "1", "--delta", "1"], "`--delta` to be above 0 and below 1"),
        ([*PLAN, "--noise", "1", "--rounds", "0"], "`--rounds` to be an integer of at least 1"),
        ([*PLAN, "--noise", "1", "--samples", "0"], "`--samples` to be an integer of at least 1, got 0"),
        ([*PLAN, "--noise", "1", "--samples", "9", "--local"], "`--local` or `--samples`, got both"),
        (PLAN, "one of the arguments --epsilon --noise is required"),
    ],
)
def test_mistakes_are_a_sentence(words: list[str], said: str) -> None:
    with pytest.raises(FederatedError, match=said):
        main(words)


def test_it_starts_without_torch() -> None:
    code = (
        "import sys\nfrom lightning_fed.cli import main\n"
        f"try: main(['privacy', *{PLAN!r}, '--noise', '1'])\n"
        "finally: print(*({'torch', 'lightning'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("noise 1: ε = 6.593")
    assert done.stdout.splitlines()[-1] == ""
