import math
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import pytest
from scipy import stats

from lightning_fed.errors import FederatedError
from lightning_fed.lab.report.runs import Summary
from lightning_fed.lab.studies.blocks import study_blocks, table_lines
from lightning_fed.lab.studies.comparison import power
from lightning_fed.lab.studies.published import Figure, read_published
from lightning_fed.lab.studies.results import StudyResults
from lightning_fed.lab.studies.study import Study, Tune, expect_sound, reported_axes
from lightning_fed.lab.studies.table import study_table
from tests.lab.studies.parts import some_results, some_study, study_run

# Last values by rule, data set and seed; the masked rule has no seed 3, and another one that FedAvg has not.
VALUES = {
    ("FedAvg", "mnist"): {0: 0.9, 1: 0.92, 2: 0.91, 3: 0.2},
    ("FedAvg", "fmnist"): {0: 0.7, 1: 0.71, 2: 0.75},
    ("FedAvg, masked", "mnist"): {0: 0.93, 1: 0.93, 2: 0.95, 4: 0.1},
    ("FedAvg, masked", "fmnist"): {0: 0.71, 1: 0.7, 2: 0.74},
}


def results(values: dict[tuple[str, str], dict[int, float]]) -> StudyResults:
    runs = [
        study_run(seed, {"test/acc": {0: 0.1, 8: at / 2, 9: at}, "val/loss": {9: 1 - at}}, rule=rule, data_set=data)
        for (rule, data), seeds in values.items()
        for seed, at in seeds.items()
    ]  # fmt: skip
    return StudyResults("two_rules", "full", tuple(runs))


def study(**report: object) -> Study:
    return replace(some_study(**report), seeds=[0, 1, 2])


def test_cells_are_means_and_paired_differences_over_shared_seeds() -> None:
    table = study_table(study(), results(VALUES))
    assert (table.row_axes, table.column_axes) == (("rule",), ("data set",))
    assert table.rows == (("FedAvg",), ("FedAvg, masked",))
    assert table.columns == (("mnist",), ("fmnist",))
    cells = {(*row, *column): cell for (row, column), cell in table.cells.items()}
    for key, seeds in VALUES.items():
        assert cells[key].summary == Summary(pytest.approx(mean(seeds.values())), pytest.approx(stdev(seeds.values())))
        assert cells[key].percent
    assert cells["FedAvg", "mnist"].difference is None
    p_values = {}
    for data in ("mnist", "fmnist"):
        ours, theirs = ([VALUES[rule, data][seed] for seed in (0, 1, 2)] for rule in ("FedAvg, masked", "FedAvg"))
        found = cells["FedAvg, masked", data].difference
        test = stats.ttest_rel(ours, theirs)
        assert (found.pairs, found.mean) == (3, pytest.approx(mean(ours) - mean(theirs)))
        assert [found.p_value, *found.t_interval] == pytest.approx([test.pvalue, *test.confidence_interval()])
        p_values[data] = test.pvalue
    # mnist has the smaller of the two.
    assert p_values["mnist"] < p_values["fmnist"]
    assert cells["FedAvg, masked", "mnist"].p_holm == pytest.approx(2 * p_values["mnist"])
    assert cells["FedAvg, masked", "fmnist"].p_holm == pytest.approx(max(p_values["fmnist"], 2 * p_values["mnist"]))


def test_each_metric_is_a_family_of_tests() -> None:
    one = [cell for cell in study_table(study(), results(VALUES)).cells.values() if cell.difference]
    both = study_table(study(metric=["test/acc", "val/loss"], columns=["data set", "metric"]), results(VALUES))
    for metric in ("test/acc", "val/loss"):
        there = [cell.p_holm for cell in both.cells.values() if cell.difference and cell.names["metric"] == metric]
        assert there == pytest.approx([cell.p_holm for cell in one])


def test_ranks_are_over_the_columns_that_all_rows_have() -> None:
    # FedAvg's mean on mnist, with seed 3, is the larger one: (1 + 1) / 2; without it (2 + 1) / 2.
    assert study_table(study(), results(VALUES)).ranks == (1.0, 2.0)
    assert study_table(study(metric=["val/loss"]), results(VALUES)).ranks == (1.0, 2.0)
    shared = {key: {seed: seeds[seed] for seed in (0, 1, 2)} for key, seeds in VALUES.items()}
    assert study_table(study(), results(shared)).ranks == (1.5, 1.5)
    del shared["FedAvg", "fmnist"]
    assert study_table(study(), results(shared)).ranks is None


def test_statistics_of_one_setting_are_not_ranked() -> None:
    one = {key: seeds for key, seeds in VALUES.items() if key[1] == "mnist"}
    both = study(statistic=["final", "best"], columns=["statistic"])
    assert len(study_table(both, results(one)).columns) == 2
    assert study_table(both, results(one)).ranks is None


def test_rounds_to_the_target() -> None:
    table = study_table(study(target=0.9), results(VALUES))
    reached = {(*row, *column): cell.to_target for (row, column), cell in table.cells.items()}
    assert reached["FedAvg", "fmnist"].found == 0
    assert reached["FedAvg", "mnist"].found == 3
    kept = {("FedAvg", "mnist"): {0: 0.9, 1: 0.92}}
    (cell,) = study_table(study(target=0.46), results(kept)).cells.values()
    assert cell.to_target == Summary(8.5, pytest.approx(math.sqrt(0.5)))


def test_a_target_is_of_the_first_metric_and_reached_by_no_run_that_is_lost() -> None:
    report = {"metric": ["test/acc", "val/loss"], "rows": ["rule", "metric"]}
    table = study_table(study(**report, target=0.1), some_results_of_three())
    assert {cell.names["metric"] for cell in table.cells.values() if cell.to_target} == {"test/acc"}
    lost = results({("FedAvg", "mnist"): {0: 0.9, 1: math.nan}})
    assert next(iter(study_table(study(target=0.1), lost).cells.values())).to_target.found == 1
    with pytest.raises(FederatedError, match=r"Expected `report.target` in \[0, 1\], .*got 80: write 0.8 for 80 %"):
        study_table(study(target=80), results(VALUES))


def test_of_several_measures_the_first_ranks() -> None:
    """By accuracy alone FedAvg is first on both data sets, whatever its loss."""
    runs = [
        study_run(0, {"test/acc": {1: acc}, "val/loss": {1: loss}}, rule=rule, data_set=data)
        for rule, acc, loss in (("FedAvg", 0.9, 2.0), ("FedAvg, masked", 0.8, 1.0))
        for data in ("mnist", "fmnist")
    ]
    both = study(
        metric=["test/acc", "val/loss"], statistic=["best", "final"], columns=["data set", "metric", "statistic"]
    )
    assert study_table(both, StudyResults("two_rules", "full", tuple(runs))).ranks == (1.0, 2.0)


def test_published_figures_stand_beside_cells() -> None:
    published = {
        "file": "gma_table2",
        "where": {"split": "iid", "num_clients": 100, "algorithm": "FedAvg"},
        "axes": {
            "data set": {"mnist": {"dataset": "MNIST"}, "fmnist": {"dataset": "FMNIST"}},
            "rule": {"FedAvg": {"aggregation": "avg"}},
        },
    }
    file = study(published=published)
    table = study_table(file, results(VALUES), read_published(published, reported_axes(file)))
    assert table.cells[("FedAvg",), ("mnist",)].published == Figure(98.28, 0.02)
    assert table.cells[("FedAvg, masked",), ("mnist",)].published is None
    where = {"alpha": 0, "statistic": "rounds 171-200"}
    by_seed = read_published({"file": "cgw_table1", "axes": {"seed": "seed"}, "where": where}, reported_axes(file))
    with pytest.raises(FederatedError, match=r"`report.rows` or `report.columns` to have 'seed'"):
        study_table(file, results(VALUES), by_seed)


def test_seeds_metrics_and_statistics_are_axes() -> None:
    report = {"metric": ["test/acc", "val/loss"], "statistic": ["final", "rounds 8-9"]}
    table = study_table(
        study(**report, rows=["seed", "metric"], columns=["rule", "statistic"]), some_results_of_three()
    )
    assert table.row_axes == ("seed", "metric", "data set")
    assert table.rows[:3] == (("0", "test/acc", "mnist"), ("0", "test/acc", "fmnist"), ("0", "val/loss", "mnist"))
    assert table.columns == tuple((rule, name) for rule in ("FedAvg", "FedAvg, masked") for name in report["statistic"])
    cell = table.cells[("1", "test/acc", "fmnist"), ("FedAvg", "rounds 8-9")]
    assert cell.values == (pytest.approx(0.71 * 0.75),)
    assert cell.summary.std is None
    assert not table.cells[("1", "val/loss", "fmnist"), ("FedAvg", "final")].percent
    assert table.ranks is None


def some_results_of_three() -> StudyResults:
    return results({key: {seed: seeds[seed] for seed in (0, 1, 2)} for key, seeds in VALUES.items()})


def test_axes_that_no_place_names_are_in_rows_where_runs_differ() -> None:
    whole = study_table(study(columns=[], rows=[]), results(VALUES))
    assert (whole.row_axes, whole.column_axes) == (("data set", "rule"), ())
    one = {key: seeds for key, seeds in VALUES.items() if key[1] == "mnist"}
    assert study_table(study(columns=[], rows=[]), results(one)).row_axes == ("rule",)


def test_metrics_and_statistics_are_columns_and_methods_stand_below_each_other() -> None:
    several = study(metric=["test/acc", "val/loss"], statistic=["final", "best"], columns=[])
    table = study_table(several, some_results_of_three())
    # The baseline's axis comes last, although the file has it first.
    assert (table.row_axes, table.column_axes) == (("data set", "rule"), ("metric", "statistic"))
    rows = study(metric=["test/acc", "val/loss"], rows=["metric"], columns=[])
    assert study_table(rows, some_results_of_three()).row_axes == ("metric", "data set", "rule")


def test_a_run_that_diverged_is_counted_and_ranks_last() -> None:
    lost = {**VALUES, ("FedAvg", "fmnist"): {0: 0.9, 1: math.nan, 2: 0.8}}
    table = study_table(study(statistic=["final"]), results(lost))
    assert table.cells[("FedAvg",), ("fmnist",)].summary.found == 2
    assert table.ranks == (1.5, 1.5)
    assert not table.cells[("FedAvg",), ("fmnist",)].is_lost
    assert study_blocks(study(), results(lost), table)[0].lines[1][2] == "85.00 ± 7.07 (2 of 3 seeds)"
    all_lost = study_table(study(), results({**VALUES, ("FedAvg", "fmnist"): dict.fromkeys((0, 1, 2), math.nan)}))
    assert study_blocks(study(), results(lost), all_lost)[0].lines[1][2] == "diverged"
    assert math.isnan(table.cells[("FedAvg, masked",), ("fmnist",)].difference.p_value)
    differences = study_blocks(study(), results(lost), table)[1]
    assert [line[:2] for line in differences.lines] == [["rule", "data set"], ["FedAvg, masked", "mnist"]]
    assert differences.note.endswith(" 1 comparison with runs that diverged is left out.")


def test_notes_say_what_is_not_there() -> None:
    assert study_table(study(), some_results_of_three()).notes == ()
    runs = some_results_of_three().runs
    shorter = replace(runs[0], rounds=8)
    table = study_table(
        study(statistic=["last 10"]), StudyResults("two_rules", "full", (shorter, *runs[1:3], *runs[4:]))
    )
    assert table.notes == (
        "Results exist for 11 of 12 runs.",
        "The runs end at different rounds, 8 to 9: each counts up to its own end.",
        "`last 10` is the mean of those of its rounds that were evaluated: up to 7 were not.",
    )


def test_of_several_metrics_one_may_be_of_other_runs() -> None:
    table = study_table(study(metric=["test/f1", "test/acc"]), some_results_of_three())
    assert {cell.names["metric"] for cell in table.cells.values()} == {"test/acc"}
    assert table.notes == ("No run has measured `test/f1`.",)


def test_one_metric_is_compared_with_another_of_the_baseline() -> None:
    own, tuned = "per_client/own/acc", "per_client/tuned/acc"
    values = {
        "FedAvg": {tuned: (0.8, 0.82, 0.81)},
        "FedAvg, masked": {own: (0.85, 0.86, 0.87), tuned: (0.7, 0.75, 0.7)},
    }
    runs = [
        study_run(seed, {name: {9: each[seed]} for name, each in metrics.items()}, rule=rule, data_set="mnist")
        for rule, metrics in values.items()
        for seed in (0, 1, 2)
    ]
    report = {"metric": [own, tuned], "columns": ["metric"], "against": {own: tuned}, "gain": {own: 0.01, tuned: 0.2}}
    asked = study(**report)
    found = StudyResults("two_rules", "full", tuple(runs))
    table = study_table(asked, found)
    cells = {(*row, *column): cell for (row, column), cell in table.cells.items()}
    assert cells.keys() == {("FedAvg", tuned), ("FedAvg, masked", own), ("FedAvg, masked", tuned)}
    for metric, claimed, word in ((own, 0.01, "ahead"), (tuned, 0.2, "behind")):
        cell = cells["FedAvg, masked", metric]
        test = stats.ttest_rel(values["FedAvg, masked"][metric], values["FedAvg"][tuned])
        assert cell.difference.p_value == pytest.approx(test.pvalue)
        assert cell.difference.t_interval == pytest.approx(tuple(test.confidence_interval()))
        assert (cell.verdict.claimed, cell.verdict.word) == (claimed, word)
    differences = study_blocks(asked, found, table)[1]
    assert differences.note.endswith(f"{own} is compared with {tuned}.")


def test_a_window_that_no_run_reaches_has_no_cells() -> None:
    table = study_table(study(statistic=["final", "rounds 50-60"]), some_results_of_three())
    assert (table.rows, table.columns) == (
        (("FedAvg",), ("FedAvg, masked",)),
        (("mnist", "final"), ("fmnist", "final")),
    )
    assert table.notes == ("0 of 12 curves reach `rounds 50-60`.",)
    with pytest.raises(FederatedError, match=r"evaluated rounds, got rounds 50-60 of runs that end at round 9\.$"):
        study_table(study(statistic=["rounds 50-60"]), some_results_of_three())


@pytest.mark.parametrize(
    ("report", "rule", "sentence"),
    [
        (
            {"metric": ["test/loss"]},
            "FedAvg",
            r"`report.metric` to name a column that was measured \(test/acc, val/loss\)",
        ),
        ({}, "FedProx", "Expected the runs of two_rules, profile full, to have the axes of the study file"),
    ],
)
def test_results_of_another_study_are_refused(report: dict[str, list[str]], rule: str, sentence: str) -> None:
    with pytest.raises(FederatedError, match=sentence):
        study_table(study(**report), results({(rule, "mnist"): {0: 0.5}}))


def test_the_results_of_a_file_make_the_table() -> None:
    assert len(study_table(some_study(), some_results()).cells) == 4


def test_pooled_rows_are_means_over_cells_seed_by_seed() -> None:
    asked = study(pool=["data set"], gain=0.005)
    table = study_table(asked, results(VALUES))
    (pooled,) = table.pooled
    ours, theirs = (
        [mean(VALUES[rule, data][seed] for data in ("mnist", "fmnist")) for seed in (0, 1, 2)]
        for rule in ("FedAvg, masked", "FedAvg")
    )
    test, found = stats.ttest_rel(ours, theirs), pooled.difference
    assert (pooled.names["rule"], pooled.names["data set"]) == ("FedAvg, masked", "2 pooled")
    assert [found.mean, found.p_value] == pytest.approx([mean(ours) - mean(theirs), test.pvalue])
    assert found.t_interval == pytest.approx(tuple(test.confidence_interval()))
    assert (pooled.verdict.claimed, pooled.verdict.word) == (0.005, "undecided")
    head, *lines = study_blocks(asked, results(VALUES), table)[1].lines
    (line,) = (line for line in lines if "2 pooled" in line)
    shown = dict(zip(head, line, strict=True))
    able = power(0.005 * math.sqrt(3) / stdev(a - b for a, b in zip(ours, theirs, strict=True)), 3)
    assert (shown["difference"], shown["power"]) == (f"{100 * found.mean:+.2f}", f"{able:.2f}")
    written = [dict(zip(table_lines(asked, table)[0], one, strict=True)) for one in table_lines(asked, table)]
    assert [one["difference"] for one in written if one["data set"] == "2 pooled"] == [f"{found.mean:.6g}"]
    assert not study_table(study(gain=0.005), results(VALUES)).pooled
    # Where nothing was learned there is nothing to pool, and one cell is no pool.
    assert not study_table(study(pool=["data set"], gain=0.005, learned=0.8), results(VALUES)).pooled


def test_pool_names_other_axes_than_the_baseline() -> None:
    for wrong in ("rule", "colour"):
        with pytest.raises(
            FederatedError, match=rf"^Expected `report\.pool` .* the baseline's \(data set\), got '{wrong}'"
        ):
            expect_sound(study(pool=[wrong]))


@pytest.mark.parametrize(
    ("theirs", "chosen", "word"),
    [
        (90.9, {}, "reproduced"),
        (90.2, {}, "undecided (baseline)"),
        (90.9, {"model.optimizer.lr": "0.1"}, "undecided (rates)"),
        (90.2, {"model.optimizer.lr": "0.1"}, "undecided (baseline, rates)"),
    ],
)
def test_a_verdict_on_a_published_gain_passes_gates(
    theirs: float, chosen: dict[str, str], word: str, tmp_path: Path
) -> None:
    """Of seeds 1 and 2 the baseline has 91 %, and the gain is 1 and 1.1 points, where the paper has 1."""
    file = tmp_path / "paper.csv"
    file.write_text(f"table,rule,value,std\nT,FedAvg,{theirs},\nT,masked,{theirs + 1},\n")
    runs = [
        study_run(seed, {"test/acc": {1: 0.5, 100: 0.91 + gain}}, chosen, rule=rule, data_set="mnist")
        for rule, gains in (("FedAvg", (0.0, 0.0)), ("FedAvg, masked", (0.01, 0.011)))
        for seed, gain in zip((1, 2), gains, strict=True)
    ]
    figures = {
        "file": str(file),
        "axes": {"rule": {"FedAvg": {"rule": "FedAvg"}, "FedAvg, masked": {"rule": "masked"}}},
    }
    asked = replace(study(), tune=Tune(seeds=[2]))
    table = study_table(
        asked, StudyResults("two_rules", "full", tuple(runs)), read_published(figures, reported_axes(asked))
    )
    verdicts = [cell.verdict for cell in table.cells.values() if cell.verdict]
    assert [(one.here, one.word) for one in verdicts] == [("ahead", word)]
    said = "Tuned on seeds of the table (2), which flatters: list others in `tune.seeds`."
    assert (said in table.notes) == bool(chosen)
