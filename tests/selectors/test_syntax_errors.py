"""Errors in SQL92 expressions: the column, the allowed tokens, and a hint."""

from __future__ import annotations

import re

import pytest

from mqtemplate.errors import ListenerError, SelectorError
from mqtemplate.selectors import grammar
from mqtemplate.selectors.expressions import MAX_DEPTH
from mqtemplate.selectors.grammar import EXAMPLE, MAX_LENGTH
from mqtemplate.selectors.sql92 import Sql92Selector


def refusal(expression: str) -> SelectorError:
    """Return the error that the expression raises."""
    with pytest.raises(SelectorError) as caught:
        Sql92Selector(expression)
    return caught.value


def test_a_hint_depends_on_the_position_of_the_error() -> None:
    """A string may contain text that would be an error outside of the string."""
    assert "write AND" not in refusal("a = '&& == !=' = (").reason
    assert "IN takes texts" not in refusal("a IN ('x') AND 5 5").reason


def test_an_error_in_an_expression_of_several_lines_names_the_line() -> None:
    """With each kind of line end; `application.yml` may contain such expressions."""
    for end in ("\n", "\r\n", "\r"):
        error = refusal(f"region = 'north'{end}  AND price >{end}  ) 10{end}")

        assert (error.line, error.column) == (3, 3)
        assert ", line 3, column 3: found ')'" in str(error)


def test_an_error_in_a_long_expression_shows_only_the_text_around_it() -> None:
    error = refusal("a = 1 OR " * 400 + "b == 2" + " OR a = 1" * 400)

    assert error.column == 3_604
    assert str(error).startswith("SQL92 expression '…OR a = 1 OR ")
    assert " OR b == 2 OR a = 1 OR " in str(error)
    assert len(str(error)) < 500
    assert error.expression.startswith("a = 1 OR ")


def test_an_error_shows_only_the_start_of_a_long_token() -> None:
    assert len(str(refusal("a b" + "b" * 10_000))) < 600


def test_the_example_in_an_error_is_a_valid_expression() -> None:
    assert EXAMPLE in refusal("").reason
    assert Sql92Selector(EXAMPLE).matches({"region": "north", "price": "15"})


def test_an_invalid_expression_is_an_error_in_the_declaration_of_a_listener() -> None:
    assert isinstance(refusal("="), ListenerError)


# --- limits -----------------------------------------------------------------------------------------


def test_the_length_of_an_expression_is_limited() -> None:
    longest = "a = '" + "x" * (MAX_LENGTH - 6) + "'"

    assert not Sql92Selector(longest).matches({"a": "x"})
    assert f"it has {MAX_LENGTH + 1} characters, allowed are {MAX_LENGTH}" in refusal(longest + " ").reason


@pytest.mark.parametrize("opened", ["NOT ", "- ", "a = "])
def test_the_nesting_of_conditions_is_limited(opened: str) -> None:
    """Without a limit an expression could exhaust the stack of the thread that evaluates it."""
    deepest, too_deep = (opened * (MAX_DEPTH + more) + "a = 1" for more in (-2, 1))

    assert not Sql92Selector(deepest).matches({"a": "1"})
    assert f"more than {MAX_DEPTH} levels" in refusal(too_deep).reason


def test_parentheses_and_rows_of_conditions_are_not_limited() -> None:
    """They need no nested calls, neither in the parser nor in the evaluation."""
    wrapped = "(" * 4_000 + "a = 1" + ")" * 4_000
    row = "a = 2 OR " * 900 + "a = 1"

    assert Sql92Selector(wrapped).matches({"a": "1"})
    assert Sql92Selector(row).matches({"a": "1"})
    assert "expected ')'" in refusal(wrapped[:-1]).reason


# --- expressions that are made to take long -----------------------------------------------------------


class CountingPattern:
    """A pattern that counts the characters that it looks at."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self.characters = 0

    def search(self, text: str, at: int = 0) -> re.Match[str] | None:
        found = self._pattern.search(text, at)
        self.characters += (len(text) if found is None else found.end()) - at
        return found


@pytest.mark.parametrize(
    "expression",
    ["-" * MAX_LENGTH, "-- " * 2_700, "- " * 4_000, "--\n" * 2_700, "'" * MAX_LENGTH, "/*" * 4_096, "/**/" * 2_048],
)
def test_the_search_for_comments_looks_at_each_character_a_few_times(
    expression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of minuses was searched for its end again at each of them: 32,000 took 10 seconds."""
    patterns = {name: CountingPattern(getattr(grammar, name)) for name in ("_START", "_LINE_END")}
    for name, pattern in patterns.items():
        monkeypatch.setattr(grammar, name, pattern)

    refusal(expression)

    assert 0 < sum(pattern.characters for pattern in patterns.values()) <= 3 * len(expression)
    assert "LINE_COMMENT" not in grammar.GRAMMAR


@pytest.mark.parametrize(
    "expression",
    [
        "a = -- it's a comment /* with \"quotes\"\n'1'",
        "a --\r\n= '1' -- the end\n",
        "-- first\n-- second\ra = '1'",
        "a /* -- no comment */ = '1'",
        "a = '1' AND b <> '--\n'",
        "a = '1' AND b <> 'it''s -- no comment\n'",
        "c = --1",
    ],
)
def test_a_comment_ends_with_its_line_and_does_not_start_inside_a_string(expression: str) -> None:
    assert Sql92Selector(expression).matches({"a": "1", "b": "2", "c": "1"})
    assert not Sql92Selector(expression).matches({"a": "2", "c": "2"})
