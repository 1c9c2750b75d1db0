"""The file of a study: read into dataclasses, or refused in one sentence that names file and place."""

import os
import re
from dataclasses import fields
from pathlib import Path

import pytest

from lightning_fed.errors import FederatedError
from lightning_fed.lab.attack.options import AttackOptions
from lightning_fed.lab.runner.file import help_on_keys, load_study
from lightning_fed.lab.studies.study import AxisValue, Profile, Report, Space, Study, Tune

WHOLE = """
title: Rates
configs: [quickstart]
set: {trainer.max_rounds: 40}
axes:
  rule:
    FedAvg: {}
    GMA: {configs: [aggregator/gma], set: {aggregator.lr: 2}}
  rate: {option: model.optimizer.lr, values: [0.001, 0.01, 1e-4]}
without: [{rule: FedAvg, rate: [0.001]}]
seeds: [0, 1]
tune:
  parameters: {aggregator.lr: [0.1, 1.0]}
  by: {rule: {GMA: {aggregator.mask.threshold: [0.2, 0.4]}}}
  per: [rule]
  at: {rate: 0.01}
report: {rows: [rule], columns: [rate], baseline: {rule: FedAvg}}
profiles:
  cpu:
    set: {trainer.max_rounds: 2}
    seeds: [0]
    axes: {rate: [0.01]}
    by: {rule: {GMA: {set: {aggregator.lr: 3}}}}
    parameters: {aggregator.lr: [1.0]}
"""


def load(folder: Path, text: str, profile: str = "full") -> Study:
    (folder / "rates.yaml").write_text(text)
    return load_study(str(folder / "rates.yaml"), profile)


def test_a_whole_file(tmp_path: Path) -> None:
    study = load(tmp_path, WHOLE)
    assert (study.title, study.name, study.configs, study.seeds) == ("Rates", "rates", ["quickstart"], [0, 1])
    assert study.axes["rule"]["GMA"] == AxisValue(["aggregator/gma"], {"aggregator.lr": 2})
    assert study.axes["rate"]["0.001"] == AxisValue(set={"model.optimizer.lr": 0.001})
    assert list(study.axes["rate"]) == ["0.001", "0.01", "0.0001"]
    assert study.without == [{"rule": ["FedAvg"], "rate": ["0.001"]}]
    assert study.tune.by["rule"]["GMA"] == {"aggregator.mask.threshold": [0.2, 0.4]}
    assert study.tune.at == {"rate": "0.01"}
    assert study.report == Report(rows=["rule"], columns=["rate"], baseline={"rule": "FedAvg"})


def test_several_metrics_and_statistics_are_axes_of_the_table(tmp_path: Path) -> None:
    report = "{rows: [rule, seed], columns: [statistic], metric: train/acc, statistic: [final, rounds 1-3]}"
    study = load(tmp_path, WHOLE.replace("{rows: [rule], columns: [rate], baseline: {rule: FedAvg}}", report))
    assert (study.report.metric, study.report.statistic) == (["train/acc"], ["final", "rounds 1-3"])


def test_a_profile_is_laid_over_the_file(tmp_path: Path) -> None:
    study = load(tmp_path, WHOLE, "cpu")
    assert (study.set, study.seeds) == ({"trainer.max_rounds": 2}, [0])
    assert list(study.axes["rate"]) == ["0.01"]
    assert study.axes["rule"] == {"FedAvg": AxisValue(), "GMA": AxisValue(["aggregator/gma"], {"aggregator.lr": 3})}
    assert study.without == []
    assert study.tune.parameters == {"aggregator.lr": [1.0]}


def test_a_range_is_for_other_samplers_than_the_grid(tmp_path: Path) -> None:
    text = "{title: T, tune: {sampler: %s, parameters: {aggregator.lr: {low: 0.1, high: 1, log: true}}}}"
    assert load(tmp_path, text % "tpe").tune.parameters == {"aggregator.lr": Space(0.1, 1, True)}
    with pytest.raises(FederatedError, match="to list values of 'aggregator.lr' for `sampler: grid`"):
        load(tmp_path, text % "grid")
    for wrong in ("low: 1, high: 0.1", "low: 0, high: 1, log: true", "low: 1, high: 1"):
        with pytest.raises(
            FederatedError, match=r"a range of 'aggregator.lr' from `low` to a larger `high` .*got [01] to"
        ):
            load(tmp_path, (text % "tpe").replace("low: 0.1, high: 1, log: true", wrong))


def test_an_attack_is_asked_for_by_its_options(tmp_path: Path) -> None:
    assert load(tmp_path, WHOLE).attack is None
    assert load(tmp_path, WHOLE + "attack: {}\n").attack == AttackOptions()
    study = load(tmp_path, WHOLE + "attack: {samples: 40, test_set: unseen}\n", "cpu")
    assert study.attack == AttackOptions("unseen", 40)
    words = "--test_set=unseen --samples=40 --draw_seed=0 --shadows=0 --bootstrap=1000"
    assert study.attack.words == tuple(words.split())


def test_what_would_do_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match=r"Expected `tune.parameters`, or `tune.by`, to name options"):
        load(tmp_path, "{title: T, tune: {sampler: tpe, trials: 3}}")
    with pytest.raises(FederatedError, match="Expected `profiles` to have names other than full"):
        load(tmp_path, "{title: T, profiles: {full: {why: all}}}")


@pytest.mark.parametrize(
    ("former", "wrong", "said"),
    [
        ("title: Rates", "titel: Rates", "There is no key `titel`, .*; did you mean `title`"),
        *(
            ("title: Rates", f"title: Rates\nname: {name}", "Expected `name` to name a folder below `--output`")
            for name in ('"a\\n#SBATCH --wrap=x"', "a/../../b", "/tmp/a", '""')
        ),
        ("  cpu:", "  ../../cpu:", "Expected `profiles` to name a folder below"),
        ("FedAvg: {}", '"Fed\\nAvg": {}', "Expected `axes` and their values to have names on one line"),
        *(
            (
                "  parameters: {aggregator.lr: [0.1, 1.0]}",
                f"  sampler: tpe\n  parameters: {{aggregator.lr: {{low: {low}, high: {high}}}}}",
                "within ±1e\\+300, above 0 with `log`, got",
            )
            for low, high in ((0, ".inf"), (".nan", 1), ("-1.0e+308", "1.0e+308"), (0, "9" * 400))
        ),
        ("at: {rate: 0.01}", "at: {rate: [0.01]}", r"Expected `tune.at.rate` to be one value, got \[0.01\]"),
        (
            "aggregator.lr: 2}",
            "aggregator.lr: !!binary aGk=}",
            "`axes.rule.GMA.set.aggregator.lr` to be text, a number or",
        ),
        ("[0.001, 0.01, 1e-4]", "[!!binary aGk=, 2020-01-01]", "Expected `axes.rate.values` to be text, a number or"),
        ("FedAvg: {}", "!!binary aGk=: {}", "Expected `axes.rule` to be text, a number or"),
        ("title: Rates", "source: here", "Expected `title`, got none"),
        ("title: Rates", "title: 3", "Expected `title` to be text, got 3"),
        ("seeds: [0, 1]", "seeds: [a]", r"Expected `seeds\[0\]` to be an integer, got 'a'"),
        ("seeds: [0, 1]", "seeds: 3", "Expected `seeds` to be a list, got 3"),
        ("seeds: [0, 1]", "seeds: [1, 1]", "Expected `seeds` to be one or more different"),
        ("FedAvg: {}", "FedAvg: {sett: {}}", "There is no key `axes.rule.FedAvg.sett`, .*mean `axes.rule.FedAvg.set`"),
        ("FedAvg: {}", "FedAvg:", "Expected `axes.rule.FedAvg` to be a mapping, got null"),
        ("rate: {option: ", "seed: {option: ", "Expected `axes` to have values, under names other than .*'seed'"),
        ("values: [0.001, 0.01, 1e-4]", "values: 1", "Expected `axes.rate.values` to be a list, got 1"),
        (
            "[{rule: FedAvg,",
            "[{rle: FedAvg,",
            r"Expected `without` to name axes of the study \(rule, rate\), got 'rle'",
        ),
        ("[{rule: FedAvg,", "[{rule: A,", r"Expected `without` to name values of 'rule' \(FedAvg, GMA\), got 'A'"),
        ("per: [rule]", "per: [x]", "Expected `tune.per` to name axes"),
        (
            "per: [rule]",
            "metric: test/acc\n  per: [rule]",
            "Expected `tune.metric` to be of a validation set.*got 'test/acc'",
        ),
        ("per: [rule]", "sampler: x\n  per: [rule]", "Expected `tune.sampler` to be one of grid, tpe, got 'x'"),
        ("per: [rule]", "pruner: [none]\n  per: [rule]", "Expected `tune.pruner` to be one of none, median"),
        ("[0.1, 1.0]", "0.1", "Expected `tune.parameters.aggregator.lr` to be a list, got 0.1"),
        ("[0.1, 1.0]", "{low: 1}", "Expected `tune.parameters.aggregator.lr.high`, got none"),
        (
            "at: {rate: 0.01}",
            "at: {rule: GMA}",
            r"Expected `tune.at` to name axes that are not in `tune.per` \(rate\), got 'rule'",
        ),
        (
            "by: {rule: {GMA:",
            "by: {rate: {0.01:",
            r"Expected `tune.by` to name axes of `tune.per` \(rule\), got 'rate'",
        ),
        ("at: {rate: 0.01}", "at: {rate: 3}", "Expected `tune.at` to name values of 'rate'"),
        ("rows: [rule]", "rows: [x]", "Expected `report.rows` to name axes"),
        ("rows: [rule]", "rows: [rule, rule]", "Expected `report.rows` to name each once, got rule, rule"),
        ("rows: [rule]", "metric: [a, b, a]", "Expected `report.metric` to name each once, got a, b, a"),
        ("rows: [rule]", "statistic: [best, best]", "Expected `report.statistic` to name each once"),
        ("rows: [rule]", "metric: rate", "Expected `axes` to have values, under names other than .*'rate'"),
        ("values: [0.001, 0.01, 1e-4]", "values: [0.1, 1e-1]", "Expected `axes.rate.values` to be different values"),
        ("{trainer.max_rounds: 40}", "{seed_everything: 5}", "Expected the seeds of runs in `seeds`, got"),
        ("[{rule: FedAvg,", "[{rule: [FedAvg, GMA]}, {rule: FedAvg,", "Expected `without` to leave some combinations"),
        ("[0.1, 1.0]", "[0.1, 0.1]", "list values of 'aggregator.lr', at least one and each once, got .0.1, 0.1"),
        ("per: [rule]", "trials: 0\n  per: [rule]", "Expected `tune.trials` to be an integer of at least 1, got 0"),
        ("per: [rule]", "metric: train/loss\n  per: [rule]", "Expected `tune.metric` to be of a validation set"),
        ("rows: [rule]", "statistic: worst", "Expected `report.statistic` to be `best`"),
        ("per: [rule]", "statistic: last\n  per: [rule]", "Expected `tune.statistic` to be `best`"),
        ("columns: [rate]", "columns: [x]", "Expected `report.columns` to name axes"),
        ("baseline: {rule: FedAvg}", "against: {test/acc: val/acc}", "Expected `report.against` to name metrics of"),
        ("baseline: {rule: FedAvg}", "gain: {val/acc: 0.01}", "Expected `report.gain` to name metrics of"),
        ("baseline: {rule: FedAvg}", "baseline: {rule: A}", "Expected `report.baseline` to name values of 'rule'"),
        ("baseline: {rule: FedAvg}", "statistic: [best, x]", "Expected `report.statistic` to be `best`, .*got 'x'"),
        (
            "baseline: {rule: FedAvg}",
            "published: {file: x}",
            "Expected `report.published.file` to be one of cgw_table1",
        ),
        ("baseline: {rule: FedAvg}", "target: high", "Expected `report.target` to be a number, got 'high'"),
        ("axes: {rate: [0.01]}", "axes: {rate: [3]}", "Expected `profiles.cpu.axes` to name values of 'rate'"),
        ("axes: {rate: [0.01]}", "axes: {rate: [0.001]}", "Expected `tune.at` to name values of 'rate'"),
        ("by: {rule: {GMA: {set", "by: {rule: {A: {set", "Expected `profiles.cpu.by` to name values of 'rule'"),
        ("{aggregator.lr: [1.0]}", "{x: [1.0]}", "Expected `profiles.cpu.parameters` to name tuned options"),
        *(
            ("seeds: [0, 1]", f"attack: {wrong}", said)
            for wrong, said in (
                ("{sample: 9}", "There is no key `attack.sample`, .*did you mean `attack.samples`"),
                ("{samples: all}", "Expected `attack.samples` to be an integer, got 'all'"),
                ("{samples: 1}", "Expected `attack.samples` to be an integer of at least 2, got 1"),
                ("{shadows: 3}", "Expected `attack.shadows` to be even, as they train in pairs, got 3"),
                ("loss", "Expected `attack` to be a mapping, got 'loss'"),
            )
        ),
        ("per: [rule]", "metric: attack/loss/auc\n  per: [rule]", "Expected `tune.metric` to be of a validation set"),
        ("seeds: [0, 1]", "title: again", "to be the YAML file of a study, but it cannot be read: the key 'title'"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_file(tmp_path: Path, former: str, wrong: str, said: str) -> None:
    assert former in WHOLE
    with pytest.raises(FederatedError, match=said) as info:
        load(tmp_path, WHOLE.replace(former, wrong, 1))
    assert str(tmp_path / "rates.yaml") in str(info.value)
    assert str(info.value).count("\n") == 0


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match="Expected a study to be a mapping, got 3"):
        load(tmp_path, "3")
    with pytest.raises(FederatedError, match="missing.yaml to be the YAML file of a study"):
        load_study(str(tmp_path / "missing.yaml"))
    with pytest.raises(FederatedError, match="Expected `--profile` to be one of full, cpu, got 'gpu'"):
        load(tmp_path, WHOLE, "gpu")


@pytest.mark.parametrize("name", ["quickstart", "studies/quickstart", "configs/studies/quickstart.yaml"])
def test_shipped_studies_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_study(name).name == "quickstart"


def test_a_study_in_a_folder_of_studies_is_named_by_its_path_there(tmp_path: Path) -> None:
    (tmp_path / "studies" / "gma").mkdir(parents=True)
    assert load(tmp_path / "studies" / "gma", "title: T").name == "gma/rates"


def test_every_key_is_explained() -> None:
    text = help_on_keys()
    for kind in (Study, AxisValue, Tune, Space, Report, Profile):
        for one in fields(kind):
            assert re.search(rf"^  {one.name}: \w", text, re.MULTILINE), one.name


def test_a_pipe_is_no_study(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FederatedError, match="Expected the YAML file of a study, got .*pipe, a pipe or a device"):
        load_study(str(tmp_path / "pipe"))
