from lightning_fed.core import is_news


def test_a_thing_is_news_when_it_differs_from_what_was_said_last() -> None:
    said = [("engine", "a"), ("engine", "a"), ("layout", "a"), ("engine", "b"), ("engine", "a")]
    assert [is_news(about, what) for about, what in said] == [True, False, True, True, True]
