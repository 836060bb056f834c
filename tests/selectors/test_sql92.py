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


def test_every_result_equals_rocketmqs() -> None:
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
    RocketMQ reports the last column of that token. If a wrong token follows NOT, it is the column of that token, where
    RocketMQ reports NOT."""
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

    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

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


def test_a_property_with_more_digits_than_python_converts_matches_no_number() -> None:
    assert not Sql92Selector("a = 5").matches({"a": "0" * 5_000})
