"""What a selector says of a message, beside what RocketMQ's own classes say."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.errors import SelectorError
from mqtemplate.selectors.sql92 import Sql92Selector
from mqtemplate.selectors.sql92.grammar import compile_expression
from mqtemplate.selectors.sql92.values import NotComparableError
from tests.sql92.golden import VALUES, Golden, golden, messages

READ = [case for case in golden() if case.answers is not None and not case.ignores_the_rest]
REFUSED = [case for case in golden() if case.refused]
CUT = [case for case in golden() if case.ignores_the_rest]

ORDER = {"TAGS": "paid", "KEYS": "4711", "region": "north", "price": "15", "weight": "2.5", "urgent": "true"}


def answers(expression: str) -> str:
    """A letter for each of the golden messages, as `Golden.answers` has them."""
    evaluate = compile_expression(expression)
    letters = ""
    for properties in messages():
        try:
            letters += {True: "t", False: "f", None: "n"}[evaluate(properties)]  # type: ignore[index]
        except NotComparableError:
            letters += "e"
    return letters


def reads(expression: str) -> bool:
    try:
        Sql92Selector(expression)
    except SelectorError:
        return False
    return True


# --- beside RocketMQ --------------------------------------------------------------------------------


def test_the_golden_cases_are_many_and_of_every_sort() -> None:
    """The tests below would pass over an empty file."""
    letters = "".join(case.answers or "" for case in READ)

    assert len(READ) > 400
    assert len(REFUSED) > 200
    assert len(CUT) > 20
    assert min(letters.count(letter) for letter in "tfne") > 1_000


def test_every_answer_is_rocketmqs() -> None:
    """True, false, NULL and no answer, for each expression that RocketMQ reads whole and each message."""
    others: list[Golden] = [case for case in READ if answers(case.expression) != case.answers]

    assert others == []


def test_what_rocketmq_refuses_is_refused() -> None:
    assert [case.expression for case in REFUSED if reads(case.expression)] == []


def test_what_rocketmq_would_cut_off_is_refused() -> None:
    """It reads ``a = 5 b = 5`` as ``a = 5``. Half a filter is not what anybody wrote."""
    assert [case.expression for case in CUT if reads(case.expression)] == []


def test_a_mistake_is_found_where_rocketmqs_parser_finds_it() -> None:
    """Two differences: what is missing at the end is missing behind the last word, where RocketMQ names that word's own
    last column; and behind NOT, the word that should not follow is named, not NOT itself."""
    elsewhere = []
    for case in REFUSED:
        with pytest.raises(SelectorError) as caught:
            Sql92Selector(case.expression)
        ours, theirs = caught.value.column, case.column
        at_end = ours == len(case.expression.rstrip()) + 1 == (theirs or 0) + 1
        behind_not = case.expression[(theirs or 1) - 1 :].upper().startswith("NOT ") and ours == (theirs or 0) + 4
        if theirs and ours != theirs and not at_end and not behind_not:
            elsewhere.append((case.expression, ours, theirs))

    assert elsewhere == []


# --- as a reader wants to know it -------------------------------------------------------------------


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
def test_an_order_is_wanted(expression: str) -> None:
    assert Sql92Selector(expression).matches(ORDER)


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("REGION = 'north'", "names of properties are as they are written"),
        ("region = 'North'", "so are texts"),
        ("discount = 5", "NULL is not equal to anything"),
        ("NOT (discount = 5)", "nor unequal"),
        ("discount <> 5", "nor unequal"),
        ("discount NOT IN ('5')", "nor outside"),
        ("discount NOT CONTAINS '5'", "a text that is not there is neither with nor without"),
        ("region NOT CONTAINS ''", "nor is any text with or without nothing"),
        ("urgent", "a property alone is no truth, whatever it says"),
        ("weight > 2", "2.5 is no whole number, so there is no answer"),
        ("NOT (weight > 99)", "no answer has no opposite"),
        ("weight > 2 OR TRUE", "nor is anything asked after it"),
        ("NOT price = 16", "NOT takes price alone: a truth compared with a number"),
        ("price = '15.0'", "two texts are compared as texts"),
        ("TRUE = urgent", "a text is read as a truth on the left only"),
        ("price = -price", "a property is a text, and a text has no negative"),
        ("price < 99999999999999999999.0 AND price > 99999999999.5", "a whole number beside a fraction is one"),
    ],
)
def test_an_order_is_not_wanted(expression: str, why: str) -> None:
    assert not Sql92Selector(expression).matches(ORDER), why


@pytest.mark.parametrize(
    ("expression", "value", "expected"),
    [
        ("a = 2147483647", "2147483648", False),  # does not fit beside a number of 32 bits: no answer
        ("a < 2147483648", "2147483647", True),
        ("a > 2147483648", "9223372036854775807", True),
        ("a > 2147483648", "9223372036854775808", False),  # nor this beside one of 64
        ("a > 1.5", "9223372036854775808", True),
        ("a > 1.5", "NaN", True),  # Java puts it above all others
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
def test_a_property_is_read_as_the_number_beside_it(expression: str, value: str, expected: bool) -> None:
    assert Sql92Selector(expression).matches({"a": value}) is expected


def test_selectors_of_one_text_are_equal() -> None:
    """A group's members are compared by what they subscribe to."""
    one, same, other = Sql92Selector("a = 1"), Sql92Selector("a = 1"), Sql92Selector("a = 2")

    assert one == same != other
    assert len({one, same, other}) == 2
    assert repr(one) == "Sql92Selector(expression='a = 1')"


def test_who_selects_by_tag_does_not_wait_for_the_grammar() -> None:
    """The library for grammars is loaded by the first selector."""
    program = (
        "import sys; from mqtemplate.selectors.sql92 import Sql92Selector; assert 'lark' not in sys.modules; "
        "Sql92Selector('a = 1'); assert 'lark' in sys.modules"
    )

    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)

    assert run.returncode == 0, run.stderr


# --- any text, any message --------------------------------------------------------------------------

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
def test_any_text_answers_yes_or_no_or_tells_its_mistake(text: str, properties: dict[str, str]) -> None:
    mistake, wanted = None, False
    try:
        wanted = Sql92Selector(text).matches(properties)
    except SelectorError as error:
        mistake = error

    assert isinstance(wanted, bool)
    if mistake is not None:
        lines = re.split(r"\r\n|\r|\n", text)
        assert 1 <= mistake.line <= len(lines)
        assert 1 <= mistake.column <= len(lines[mistake.line - 1]) + 1


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
    """Where every comparison has an answer: De Morgan's laws, NULL included; order and parentheses do not count."""

    def value(expression: str) -> object:
        return compile_expression(expression)(properties)

    assert value(f"NOT ({one} AND {other})") is value(f"(NOT ({one})) OR (NOT ({other}))")
    assert value(f"NOT ({one} OR {other})") is value(f"(NOT ({one})) AND (NOT ({other}))")
    assert value(f"{one} AND {other}") is value(f"(({other})) AND {one}")
    assert value(f"{one} OR {other} OR {one}") is value(f"{other} OR ({one} OR {one})")
