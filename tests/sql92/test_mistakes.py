"""What is said of a text that is no expression: where, what could stand there, what was probably meant."""

from __future__ import annotations

import pytest

from mqtemplate.errors import ListenerError, SelectorError
from mqtemplate.selectors.sql92 import Sql92Selector
from mqtemplate.selectors.sql92.grammar import MAX_LENGTH
from mqtemplate.selectors.sql92.mistakes import EXAMPLE
from mqtemplate.selectors.sql92.parts import MAX_DEPTH


def refusal(expression: str) -> SelectorError:
    with pytest.raises(SelectorError) as caught:
        Sql92Selector(expression)
    return caught.value


@pytest.mark.parametrize(
    ("expression", "column", "told"),
    [
        # words
        ("", 1, "something is missing, expected a property, a number, a 'text'"),
        ("a =", 4, "something is missing, expected a property"),
        ("(a = 1", 7, "something is missing, expected ')'"),
        ("a = 1)", 6, "found ')', expected the end"),
        ("a BETWEEN 1", 12, "something is missing, expected AND"),
        ("a BETWEEN 1 OR 2", 13, "found 'OR', expected AND"),
        ("a NOT 5", 7, "found '5', expected BETWEEN, or IN, or CONTAINS, STARTSWITH or ENDSWITH"),
        ("a IS 5", 6, "found '5', expected NULL, or NOT"),
        ("a = 1 b = 2", 7, "found 'b', expected =, <>,"),
        ("a IN ('x'", 10, "expected ')', or ','"),
        ("a IN ()", 7, "found ')', expected a 'text'"),
        ("a = é", 5, "'é' begins no word; for example: region = 'north'"),
        # habits from elsewhere
        ("a == 1", 4, "write one = for equal"),
        ("a != 1", 3, "write <> for unequal"),
        ("a => 1", 4, "write <= or >="),
        ("a = 1 && b = 2", 7, "write AND"),
        ("paid || refunded", 6, "write OR (|| is for tags)"),
        ('a = "x"', 5, "single quotes, as in region = 'north'"),
        ("a LIKE 'x%'", 3, "write name CONTAINS 'text', name STARTSWITH 'text'"),
        ("*", 1, "for every message, select by tag: *"),
        ("a IN (1, 2)", 7, "IN takes texts, as in size IN ('1', '2')"),
        ("a = 007", 6, "without leading zeros"),
        ("a = 0x10", 6, "in decimal digits"),
        ("order-id = 5", 6, "a property's name has letters, digits, _ and $ only"),
        ("order.id = 5", 6, "a property's name has letters, digits, _ and $ only"),
        ("a * 2 > 5", 3, "there is no arithmetic"),
        ("a = 1;", 6, "leave out the semicolon"),
        # no end
        ("a = 'x", 5, "the text that begins here has no end; close it by '"),
        ("a = 1 /* x", 7, "the comment that begins here has no end; close it by */"),
        ("a = 1 -- x", 7, "this line has no end; use /* */"),
        # read, but without sense
        ("b OR 1", 6, "a number alone is no condition; compare it, as in price = 10"),
        ("'x'", 1, "a text alone is no condition"),
        ("a = NULL", 5, "write region IS NULL, or region IS NOT NULL"),
        ("TRUE = 1", 8, "write urgent = TRUE"),
        ("a > 'x'", 5, "a text cannot be compared by >"),
        ("a <= TRUE", 6, "a truth cannot be compared by <="),
        ("NOT a > 1", 1, "NOT takes the next word only: NOT (price > 10)"),
        ("1 IN ('1')", 1, "only a property can be IN a list"),
        ("a BETWEEN 10 AND 5", 11, "10 is above 5; BETWEEN takes the lower bound first"),
        ("a = 9223372036854775808", 5, "whole numbers go up to 9223372036854775807"),
        ("a > 0.0", 5, "for zero write 0, without a dot"),
        ("a < 1e400", 5, "a fraction lies between 4.9e-324 and 1.7976931348623157e308"),
    ],
)
def test_a_mistake_is_told_with_its_column_and_a_way_out(expression: str, column: int, told: str) -> None:
    error = refusal(expression)

    assert (error.line, error.column) == (1, column)
    assert str(error) == f"SQL92 expression {expression!r}, column {column}: {error.reason}"
    assert told in error.reason


def test_the_hint_goes_with_the_place_not_with_the_text() -> None:
    """A text may hold what would be a mistake outside of it."""
    assert "write AND" not in refusal("a = '&& == !=' = (").reason
    assert "IN takes texts" not in refusal("a IN ('x') AND 5 5").reason


def test_a_mistake_in_an_expression_of_several_lines_is_told_with_its_line() -> None:
    """As `application.yml` can hold it; whatever ends the lines."""
    for end in ("\n", "\r\n", "\r"):
        error = refusal(f"region = 'north'{end}  AND price >{end}  ) 10{end}")

        assert (error.line, error.column) == (3, 3)
        assert ", line 3, column 3: found ')'" in str(error)


def test_of_a_long_expression_the_neighbourhood_is_shown() -> None:
    error = refusal("a = 1 OR " * 1_000 + "b == 2" + " OR a = 1" * 1_000)

    assert error.column == 9_004
    assert str(error).startswith("SQL92 expression '…OR a = 1 OR ")
    assert " OR b == 2 OR a = 1 OR " in str(error)
    assert len(str(error)) < 500
    assert error.expression.startswith("a = 1 OR ")


def test_a_long_word_is_not_shown_whole() -> None:
    assert len(str(refusal("a b" + "b" * 10_000))) < 600


def test_the_example_in_a_mistakes_text_is_an_expression() -> None:
    assert EXAMPLE in refusal("").reason
    assert Sql92Selector(EXAMPLE).matches({"region": "north", "price": "15"})


def test_it_is_an_error_of_the_listeners_declaration() -> None:
    assert isinstance(refusal("="), ListenerError)


# --- limits -----------------------------------------------------------------------------------------


def test_an_expression_has_a_greatest_length() -> None:
    longest = "a = '" + "x" * (MAX_LENGTH - 6) + "'"

    assert not Sql92Selector(longest).matches({"a": "x"})
    assert f"it has {MAX_LENGTH + 1} characters, allowed are {MAX_LENGTH}" in refusal(longest + " ").reason


@pytest.mark.parametrize("opened", ["NOT ", "- ", "a = "])
def test_conditions_within_conditions_have_a_greatest_depth(opened: str) -> None:
    """So that no text can exhaust the stack of whoever evaluates it."""
    deepest, too_deep = (opened * (MAX_DEPTH + more) + "a = 1" for more in (-2, 1))

    assert not Sql92Selector(deepest).matches({"a": "1"})
    assert f"more than {MAX_DEPTH} conditions deep" in refusal(too_deep).reason


def test_parentheses_and_rows_do_not_count_as_depth() -> None:
    """They cost no calls within calls, neither while reading nor later."""
    wrapped = "(" * 10_000 + "a = 1" + ")" * 10_000
    row = "a = 2 OR " * 2_000 + "a = 1"

    assert Sql92Selector(wrapped).matches({"a": "1"})
    assert Sql92Selector(row).matches({"a": "1"})
    assert "expected ')'" in refusal(wrapped[:-1]).reason
