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


@pytest.mark.parametrize(
    ("expression", "column", "reason"),
    [
        # tokens
        ("", 1, "something is missing, expected a property, a number, a 'string'"),
        ("a =", 4, "something is missing, expected a property"),
        ("(a = 1", 7, "something is missing, expected ')'"),
        ("a = 1)", 6, "found ')', expected the end"),
        ("a BETWEEN 1", 12, "something is missing, expected AND"),
        ("a BETWEEN 1 OR 2", 13, "found 'OR', expected AND"),
        ("a NOT 5", 7, "found '5', expected BETWEEN, or IN, or CONTAINS, STARTSWITH or ENDSWITH"),
        ("a IS 5", 6, "found '5', expected NULL, or NOT"),
        ("a = 1 b = 2", 7, "found 'b', expected =, <>,"),
        ("a IN ('x'", 10, "expected ')', or ','"),
        ("a IN ()", 7, "found ')', expected a 'string'"),
        ("a = é", 5, "no token starts with 'é'; for example: region = 'north'"),
        # operators of other languages
        ("a == 1", 4, "write one = for equal"),
        ("a != 1", 3, "write <> for unequal"),
        ("a => 1", 4, "write <= or >="),
        ("a = 1 && b = 2", 7, "write AND"),
        ("paid || refunded", 6, "write OR (|| is for tags)"),
        ('a = "x"', 5, "single quotes, as in region = 'north'"),
        ("a LIKE 'x%'", 3, "write name CONTAINS 'text', name STARTSWITH 'text'"),
        ("*", 1, "for all messages use the tag selector *"),
        ("a IN (1, 2)", 7, "IN takes strings, as in size IN ('1', '2')"),
        ("a = 007", 6, "without leading zeros"),
        ("a = 0x10", 6, "in decimal digits"),
        ("order-id = 5", 6, "a property name may have only letters, digits, _ and $"),
        ("order.id = 5", 6, "a property name may have only letters, digits, _ and $"),
        ("a * 2 > 5", 3, "there is no arithmetic"),
        ("a = 1;", 6, "remove the semicolon"),
        # missing ends
        ("a = 'x", 5, "the string that starts here has no end; close it with '"),
        ("a = 1 /* x", 7, "the comment that starts here has no end; close it with */"),
        ("a = 1 -- x", 7, "this line has no end; use /* */"),
        # operands that are not allowed
        ("b OR 1", 6, "an integer alone is no condition; compare it, as in price = 10"),
        ("'x'", 1, "a string alone is no condition"),
        ("a = NULL", 5, "write region IS NULL, or region IS NOT NULL"),
        ("TRUE = 1", 8, "write urgent = TRUE"),
        ("a > 'x'", 5, "a string cannot be compared by >"),
        ("a <= TRUE", 6, "a boolean cannot be compared by <="),
        ("NOT a > 1", 1, "NOT applies to the next operand only: NOT (price > 10)"),
        ("1 IN ('1')", 1, "only a property can be IN a list"),
        ("a BETWEEN 10 AND 5", 11, "10 is above 5; BETWEEN takes the lower bound first"),
        ("a = 9223372036854775808", 5, "integers go up to 9223372036854775807"),
        ("a > 0.0", 5, "for zero write 0, without a dot"),
        ("a < 1e400", 5, "a decimal number must be 4.9e-324..1.7976931348623157e308"),
    ],
)
def test_an_error_names_the_column_and_a_solution(expression: str, column: int, reason: str) -> None:
    error = refusal(expression)

    assert (error.line, error.column) == (1, column)
    assert str(error) == f"SQL92 expression {expression!r}, column {column}: {error.reason}"
    assert reason in error.reason


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
def test_a_comment_ends_with_its_line_and_is_none_inside_a_string(expression: str) -> None:
    assert Sql92Selector(expression).matches({"a": "1", "b": "2", "c": "1"})
    assert not Sql92Selector(expression).matches({"a": "2", "c": "2"})
