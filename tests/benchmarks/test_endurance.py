"""What the benchmark of long runs measures."""

from benchmarks.endurance import grown, run, table


def test_a_few_rounds_are_watched() -> None:
    found = run(rounds=4, every=2)
    assert [row[0] for row in found] == [2, 4]
    assert all(value > 0 for row in found for value in row)
    assert "| open files | " in table(found)


def test_growth_is_seen_beside_the_start() -> None:
    assert grown([9.0] * 10 + [1.0] * 10 + [1.0] * 70 + [3.0] * 10) == (1.0, 3.0)
