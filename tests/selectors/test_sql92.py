"""Results of SQL92 selectors, compared with the results of RocketMQ's own classes."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.errors import SelectorError
from mqtemplate.selectors.expressions import NotComparableError
from mqtemplate.selectors.grammar import compile_expression
from mqtemplate.selectors.sql92 import Sql92Selector
from tests.selectors.golden import VALUES, Golden, golden, messages

VALID = [case for case in golden() if case.answers is not None and not case.ignores_the_rest]
REFUSED = [case for case in golden() if case.refused]
TRUNCATED = [case for case in golden() if case.ignores_the_rest]

ORDER = {"TAGS": "paid", "KEYS": "4711", "region": "north", "price": "15", "weight": "2.5", "urgent": "true"}


def answers(expression: str) -> str:
    """Return a letter for each of the golden messages, as in `Golden.answers`."""
    evaluate = compile_expression(expression)
    letters = ""
    for properties in messages():
        try:
            letters += {True: "t", False: "f", None: "n"}[evaluate(properties)]  # type: ignore[index]
        except NotComparableError:
            letters += "e"
    return letters


def is_valid(expression: str) -> bool:
    try:
        Sql92Selector(expression)
    except SelectorError:
        return False
    return True


# --- compared with RocketMQ -------------------------------------------------------------------------


def test_the_golden_file_has_cases_of_every_kind() -> None:
    """Without cases the tests below would pass without any check."""
    letters = "".join(case.answers or "" for case in VALID)

    assert len(VALID) > 400
    assert len(REFUSED) > 200
    assert len(TRUNCATED) > 20
    assert min(letters.count(letter) for letter in "tfne") > 1_000


def test_every_result_is_that_of_rocketmq() -> None:
    """True, false, NULL or error, for each message and each expression that RocketMQ reads to its end."""
    others: list[Golden] = [case for case in VALID if answers(case.expression) != case.answers]

    assert others == []


def test_an_expression_that_rocketmq_refuses_is_refused() -> None:
    assert [case.expression for case in REFUSED if is_valid(case.expression)] == []


def test_an_expression_of_which_rocketmq_ignores_the_rest_is_refused() -> None:
    """RocketMQ reads ``a = 5 b = 5`` as ``a = 5``, which cannot be the intention."""
    assert [case.expression for case in TRUNCATED if is_valid(case.expression)] == []


def test_an_error_has_the_column_that_rocketmq_reports() -> None:
    """There are two differences. If something is missing at the end, the column is one past the last token, where
    RocketMQ reports the last column of that token. If a wrong token follows NOT, the column is that of the wrong token,
    where RocketMQ reports NOT."""
    different = []
    for case in REFUSED:
        with pytest.raises(SelectorError) as caught:
            Sql92Selector(case.expression)
        ours, theirs = caught.value.column, case.column
        at_end = ours == len(case.expression.rstrip()) + 1 == (theirs or 0) + 1
        after_not = case.expression[(theirs or 1) - 1 :].upper().startswith("NOT ") and ours == (theirs or 0) + 4
        if theirs and ours != theirs and not at_end and not after_not:
            different.append((case.expression, ours, theirs))

    assert different == []


# --- examples ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expression",
    [
        "region = 'north'",
        "region <> 'south'",
        "price > 10 AND price <= 15",
        "price BETWEEN 10 AND 20",
        "price NOT BETWEEN 16 AND 20",
        "region IN ('north', 'west') AND region NOT IN ('south')",
        "discount IS NULL AND region IS NOT NULL",
        "urgent = TRUE AND NOT (urgent = FALSE)",
        "TAGS = 'paid' OR TAGS = 'refunded'",
        "KEYS contains '71' and KEYS StartsWith '47' AND KEYS ENDSWITH '11' AND KEYS NOT CONTAINS 'x'",
        "weight > 2.4 AND weight < 2.6E0 AND weight > -2.5",
        "price = 15 /* a note */ AND -- another\n region = 'north'",
        "price < weight = FALSE",
        "TRUE OR weight > 2",
    ],
)
def test_an_expression_matches_an_order(expression: str) -> None:
    assert Sql92Selector(expression).matches(ORDER)


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("REGION = 'north'", "names of properties are case-sensitive"),
        ("region = 'North'", "strings are case-sensitive"),
        ("discount = 5", "NULL is not equal to any value"),
        ("NOT (discount = 5)", "NULL is not unequal to any value"),
        ("discount <> 5", "NULL is not unequal to any value"),
        ("discount NOT IN ('5')", "NULL is not outside a list"),
        ("discount NOT CONTAINS '5'", "a missing property neither contains a string nor lacks it"),
        ("region NOT CONTAINS ''", "no string contains the empty string or lacks it"),
        ("urgent", "a property alone is false, whatever its value is"),
        ("weight > 2", "2.5 is not an integer, so the comparison cannot be evaluated"),
        ("NOT (weight > 99)", "NOT does not change that a comparison cannot be evaluated"),
        ("weight > 2 OR TRUE", "nothing is evaluated after it"),
        ("NOT price = 16", "NOT applies to price only: a boolean compared with a number"),
        ("price = '15.0'", "two strings are compared as strings"),
        ("TRUE = urgent", "a string is converted to a boolean only on the left side"),
        ("price = -price", "a property is a string, and a string has no negative"),
        (
            "price < 99999999999999999999.0 AND price > 99999999999.5",
            "an integer is converted for a decimal number",
        ),
    ],
)
def test_an_expression_does_not_match_an_order(expression: str, why: str) -> None:
    assert not Sql92Selector(expression).matches(ORDER), why


@pytest.mark.parametrize(
    ("expression", "value", "expected"),
    [
        ("a = 2147483647", "2147483648", False),  # more than 32 bits: cannot be evaluated
        ("a < 2147483648", "2147483647", True),
        ("a > 2147483648", "9223372036854775807", True),
        ("a > 2147483648", "9223372036854775808", False),  # more than 64 bits
        ("a > 1.5", "9223372036854775808", True),
        ("a > 1.5", "NaN", True),  # Java: NaN is above all numbers
        ("a < 1.5", "-Infinity", True),
        ("a > 1.5", "inf", False),
        ("a = 5", " 5", False),
        ("a = 5.0", " 5\t", True),
        ("a = 5.0", "5d", True),
        ("a = 8.0", "0x1p3", True),
        ("a > 8.0", "0x1p9999", True),
        ("a < 8.0", "-0x1p9999", True),
        ("a = 5", "5_", False),
        ("a = 5", "+5", True),
        ("a = 5", "0" * 5_000, False),
    ],
)
def test_a_property_is_parsed_as_the_type_of_the_number(expression: str, value: str, expected: bool) -> None:
    assert Sql92Selector(expression).matches({"a": value}) is expected


def test_selectors_with_the_same_expression_are_equal() -> None:
    """The subscriptions of the members of a group are compared."""
    one, same, other = Sql92Selector("a = 1"), Sql92Selector("a = 1"), Sql92Selector("a = 2")

    assert one == same != other
    assert len({one, same, other}) == 2
    assert repr(one) == "Sql92Selector(expression='a = 1')"


def test_the_parser_library_is_imported_by_the_first_sql92_selector() -> None:
    """An application that selects by tag does not import it."""
    program = (
        "import sys; from mqtemplate.selectors.sql92 import Sql92Selector; assert 'lark' not in sys.modules; "
        "Sql92Selector('a = 1'); assert 'lark' in sys.modules"
    )

    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)

    assert run.returncode == 0, run.stderr


# --- properties of all expressions ------------------------------------------------------------------

_WORDS = (
    "a b TAGS NOT AND OR IN IS NULL TRUE FALSE BETWEEN CONTAINS STARTSWITH ENDSWITH = <> < <= > >= + - ( ) , "
    "1 5 1.5 0 2147483648 'x' '' 'it''s' '5' ' \" ; /* */ -- == !="
)
WORDS = st.sampled_from([*_WORDS.split(), "\n", "\r\n"])
TEXTS = st.one_of(st.text(max_size=40), st.lists(WORDS, max_size=25).map(" ".join))
PROPERTIES = st.dictionaries(
    st.sampled_from(["a", "b", "TAGS"]),
    st.one_of(st.text(max_size=8), st.sampled_from([text for text in VALUES if text])),
)


@given(TEXTS, PROPERTIES)
def test_any_text_matches_or_not_or_is_refused(text: str, properties: dict[str, str]) -> None:
    refused, matches = None, False
    try:
        matches = Sql92Selector(text).matches(properties)
    except SelectorError as error:
        refused = error

    assert isinstance(matches, bool)
    if refused is not None:
        lines = re.split(r"\r\n|\r|\n", text)
        assert 1 <= refused.line <= len(lines)
        assert 1 <= refused.column <= len(lines[refused.line - 1]) + 1


CONDITIONS = st.recursive(
    st.sampled_from(["a = 'x'", "b = 'x'", "a <> b", "a IS NULL", "b IN ('x', 'y')", "a CONTAINS 'x'", "TRUE", "NULL"]),
    lambda inner: st.one_of(
        inner.map("NOT ({})".format),
        st.builds("({} AND {})".format, inner, inner),
        st.builds("({} OR {})".format, inner, inner),
    ),
    max_leaves=8,
)
FEW = st.dictionaries(st.sampled_from("ab"), st.sampled_from("xyz"))


@given(CONDITIONS, CONDITIONS, FEW)
def test_not_and_or_keep_the_laws_of_three_values(one: str, other: str, properties: dict[str, str]) -> None:
    """For conditions that can be evaluated, also with NULL: De Morgan's laws, any order, any parentheses."""

    def value(expression: str) -> object:
        return compile_expression(expression)(properties)

    assert value(f"NOT ({one} AND {other})") is value(f"(NOT ({one})) OR (NOT ({other}))")
    assert value(f"NOT ({one} OR {other})") is value(f"(NOT ({one})) AND (NOT ({other}))")
    assert value(f"{one} AND {other}") is value(f"(({other})) AND {one}")
    assert value(f"{one} OR {other} OR {one}") is value(f"{other} OR ({one} OR {one})")
