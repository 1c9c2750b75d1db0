"""What tests are made of."""

import ast
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import conftest
from tests.parts import cover, graded


def together(cases: list[tuple[str, ...]]) -> set[tuple[int, str, int, str]]:
    return {(i, case[i], j, case[j]) for case in cases for j in range(len(case)) for i in range(j)}


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.sets(st.integers(0, 99)))
@settings(deadline=None, max_examples=20)
def test_every_two_values_that_go_together_are_chosen_together(sizes: list[int], left_out: set[int]) -> None:
    every = [case for i, case in enumerate(product(*("abcd"[:size] for size in sizes))) if i not in left_out]
    chosen = cover(every)
    assert together(chosen) == together(every)
    assert set(chosen) <= set(every)
    assert len(set(chosen)) == len(chosen)
    assert cover(every) == chosen
    once = cover(every, strength=1)
    assert {each for case in once for each in enumerate(case)} == {each for case in every for each in enumerate(case)}


def test_few_cases_are_chosen() -> None:
    assert len(cover(product("abcdefgh", "abcdefg", "abc", "ab", "ab"))) < 80 < 8 * 7 * 3 * 2 * 2


def test_what_is_not_slow_has_every_value_once() -> None:
    given = graded(product("abcd", "abc"))
    assert [each.values for each in given[:4]] == [("a", "a"), ("b", "b"), ("c", "c"), ("d", "a")]
    assert [[mark.name for mark in each.marks] for each in given] == [[]] * 4 + [["slow"]] * 8
    fewer = graded(product("abcd", "abc"), quick=2)
    assert [each.values for each in fewer] == [each.values for each in given]
    assert [len(each.marks) for each in fewer] == [0] * 2 + [1] * 10


def test_where_pairs_never_meet_each_value_is_kept() -> None:
    given = graded(product("abcd", "abc"), quick=1, kept=[("d", "c"), ("b", "c"), ("x", "c")])
    assert [each.values for each in given[:4]] == [("d", "c"), ("b", "c"), ("a", "a"), ("b", "b")]
    assert {each.values for each in given} == set(product("abcd", "abc"))
    marks = [[mark.name for mark in each.marks] for each in given]
    assert marks == [[], *[["slow"]] * 5, *[["slow", "pairs"]] * 6]


def test_classes_that_the_command_line_names_are_there_once() -> None:
    """One of the same name elsewhere would make the short name ambiguous, in whichever test runs after its import."""
    tests = Path(__file__).parent
    named = {
        node.name for node in ast.parse((tests / "cli/parts.py").read_text()).body if isinstance(node, ast.ClassDef)
    }
    others = {path: ast.parse(path.read_text()).body for path in tests.rglob("*.py") if path.name != "parts.py"}
    again = [
        (node.name, path.relative_to(tests).as_posix())
        for path, body in others.items()
        for node in body
        if isinstance(node, ast.ClassDef) and node.name in named
    ]
    # The others are of another kind: no model, and no client algorithms.
    elsewhere = [("Failing", "distributed/process_cases.py"), ("Failing", "engines/test_client_errors.py")]
    assert sorted(again) == [*elsewhere, ("Plain", "data/test_datamodule.py")]


def test_of_the_cases_of_a_quick_test_the_others_are_slow() -> None:
    class Case:
        def __init__(self, nodeid: str, *marks: pytest.Mark) -> None:
            self.nodeid, self.marks = nodeid, [*marks]

        def get_closest_marker(self, name: str) -> pytest.Mark | None:
            return next((mark for mark in self.marks if mark.name == name), None)

        def add_marker(self, mark: pytest.MarkDecorator) -> None:
            self.marks.append(mark.mark)

    quick, slow = pytest.mark.quick(3).mark, pytest.mark.slow.mark
    some = [Case(f"a.py::one[{at}]", quick) for at in range(9)]
    few = [Case("a.py::two[0]", quick), Case("a.py::two[1]", quick, slow)]
    others = [Case(f"a.py::three[{at}]") for at in range(5)]
    cases: list[Any] = [*some, *few, *others]
    conftest.pytest_collection_modifyitems(cases)
    kept = [sum(not case.get_closest_marker("slow") for case in of) for of in (some, few, others)]
    assert kept == [3, 1, 5]
