"""Parser of SQL92 expressions: from the text to a function that evaluates it, or to the description of an error.

Source: RocketMQ ``filter: parser/SelectorParser.jj``. As there, the context does not change how a word is read, the
longest match wins, and a keyword may follow a number without a space: ``a = 1and b = 2``. A module of its own, because
the parser library (lark) is slow to import: `Sql92Selector` imports it when the first expression is compiled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from functools import cache
from typing import cast

from lark import Lark, Token, Transformer, UnexpectedCharacters, UnexpectedToken, v_args

from mqtemplate.errors import SelectorError
from mqtemplate.numbers import INT_MAX, LONG_MAX
from mqtemplate.selectors import expressions
from mqtemplate.selectors.expressions import Evaluate, Expression, OperandError, ValueType

# --- syntax errors --------------------------------------------------------------------------------


EXAMPLE = "region = 'north' AND price BETWEEN 10 AND 20"

_OPERAND = "a property, a number, a 'string', TRUE, FALSE, NULL, NOT or '('"
_OPERATOR = "=, <>, <, <=, >, >=, IS, IN, BETWEEN, CONTAINS, STARTSWITH, ENDSWITH or NOT"

_DESCRIPTIONS: dict[str, str] = {
    # terminal of the grammar -> description; the description of a head of _FAMILIES covers its whole family
    "NAME": _OPERAND,
    "ORDER": _OPERATOR,
    "_EQUAL": "=, <> or IS",
    "_AND": "AND",
    "_OR": "OR",
    "RPAR": "')'",
    "LPAR": "'('",
    "COMMA": "','",
    "$END": "the end",
    "STRING": "a 'string'",
    "NULL": "NULL",
    "NOT": "NOT",
    "_BETWEEN": "BETWEEN",
    "_IN": "IN",
    "TEST": "CONTAINS, STARTSWITH or ENDSWITH",
}
_FAMILIES: dict[str, frozenset[str]] = {
    "NAME": frozenset({"STRING", "NULL", "NOT", "LPAR"}),
    "ORDER": frozenset({"_EQUAL", "NOT", "_BETWEEN", "_IN", "TEST"}),
}

_HINTS: tuple[tuple[str, str, str], ...] = (
    # pattern of the text before the error, pattern of the text at the error, hint; the first match is used
    ("=", "=", "write one = for equal"),
    ("", "!=?", "write <> for unequal, NOT for not"),
    ("=", "[<>]", "write <= or >=, with = last"),
    ("", "&&?", "write AND"),
    ("", r"\|\|?", "write OR (|| is for tags)"),
    ("", '"', "write strings in single quotes, as in region = 'north'"),
    ("", "'", "the string that starts here has no end; close it with ', and double a ' inside it"),
    ("", r"/\*", "the comment that starts here has no end; close it with */"),
    ("", "--", "a comment that starts with -- ends at the end of its line, and this line has no end; use /* */"),
    ("", r"(?i:like|r?regexp?|rlike|matches)\b", "write name CONTAINS 'text', name STARTSWITH 'text' or ENDSWITH"),
    (r"^\s*", r"\*\s*$", "for all messages use the tag selector *"),
    (r"(?i:\bIN\s*\([^()]*)", r"[-+.\w]", "IN takes strings, as in size IN ('1', '2'); or write size = 1 OR size = 2"),
    (r"(?:^|\W)0", r"[0-9]", "write numbers without leading zeros"),
    (r"(?:^|\W)0", r"[xXlL]", "write numbers in decimal digits"),
    ("", r"[-+*/%]", "there is no arithmetic, and a property name may have only letters, digits, _ and $"),
    (r"\w\s*", r"\.", "a property name may have only letters, digits, _ and $"),
    ("", ";", "remove the semicolon"),
)
_HINT_CONTEXT = 200  # characters before and after the error that the patterns see
_LONGEST_TOKEN_SHOWN = 40


def describe_error(expression: str, at: int, found: str | None = None, allowed: Collection[str] = ()) -> str:
    """Return a description of a syntax error.

    Args:
        at: Index into the expression; one past the last token if something is missing there.
        found: The token at *at*, empty at the end of the expression; None if no token starts there.
        allowed: Names of the terminals that the grammar allows at *at*.
    """
    if found is None:
        reason = f"no token starts with {expression[at]!r}"
    else:
        reason = f"found {found[:_LONGEST_TOKEN_SHOWN]!r}" if found else "something is missing"
    if allowed:
        reason += f", expected {_list(allowed)}"
    hint = _hint(expression, at) if found != "" else ""
    return f"{reason}{hint and '; '}{hint}; for example: {EXAMPLE}"


def _list(terminals: Collection[str]) -> str:
    covered = {name for head, others in _FAMILIES.items() if head in terminals for name in others}
    return ", or ".join(text for name, text in _DESCRIPTIONS.items() if name in terminals and name not in covered)


def _hint(expression: str, at: int) -> str:
    before = expression[max(0, at - _HINT_CONTEXT) : at]
    for before_pattern, pattern, hint in _HINTS:
        if re.match(pattern, expression[at : at + _HINT_CONTEXT]) and re.search(f"(?:{before_pattern})$", before):
            return hint
    return ""


# --- parser ---------------------------------------------------------------------------------------


MAX_LENGTH = 8_192
"""Longest expression in characters: room for several hundred strings."""

# `[NOT]` passes the token or None to the method of the rule.
GRAMMAR = r"""
start: disjunction

?disjunction: conjunction
    | conjunction (_OR conjunction)+ -> any_of
?conjunction: equality
    | equality (_AND equality)+ -> all_of

?equality: comparison
    | equality _EQUAL comparison -> equal
    | equality _UNEQUAL comparison -> unequal
    | equality _IS [NOT] NULL -> is_null

?comparison: unary
    | comparison ORDER unary -> compared
    | comparison [NOT] TEST STRING -> tested
    | comparison [NOT] _BETWEEN unary _AND unary -> between
    | comparison [NOT] _IN strings -> is_in
strings: "(" STRING ("," STRING)* ")"

?unary: primary
    | "+" unary
    | MINUS unary -> negative
    | NOT unary -> negated

?primary: STRING -> string
    | WHOLE -> whole_number
    | FRACTION -> decimal_number
    | TRUE -> boolean
    | FALSE -> boolean
    | NULL -> null
    | NAME -> property_named
    | "(" disjunction ")"

%declare NOT _AND _OR _BETWEEN _IN TRUE FALSE NULL _IS TEST

NAME: /[A-Za-z_$][A-Za-z0-9_$]*/
WHOLE: /0|[1-9][0-9]*[lL]?/
FRACTION.1: /(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+/
STRING: /'(?:''|[^'])*'/
ORDER: ">=" | "<=" | ">" | "<"
_UNEQUAL.1: "<>"
_EQUAL: "="
MINUS: "-"

BLANKS: /[ \t\n\r\f]+/
BLOCK_COMMENT.1: /\/\*(?:[^*]|\*(?!\/))*\*\//
%ignore BLANKS
%ignore BLOCK_COMMENT
"""

_KEYWORDS = {
    **{word: word for word in ("NOT", "TRUE", "FALSE", "NULL")},
    **{word: f"_{word}" for word in ("AND", "OR", "BETWEEN", "IN", "IS")},
    **dict.fromkeys(("CONTAINS", "STARTSWITH", "ENDSWITH"), "TEST"),
}


def compile_expression(expression: str) -> Evaluate:
    """Parse an expression.

    Returns:
        A function of the properties of a message. It returns True, False or None for NULL, and raises
        `NotComparableError` if the expression cannot be evaluated.

    Raises:
        SelectorError: The expression is invalid; see `Sql92Selector`.
    """
    if len(expression) > MAX_LENGTH:
        raise SelectorError(
            expression, MAX_LENGTH, f"it has {len(expression)} characters, allowed are {MAX_LENGTH}; use several groups"
        )
    try:
        return cast("Expression", _parser().parse(_without_line_comments(expression))).evaluate
    except OperandError as exc:
        raise SelectorError(expression, exc.at, exc.reason) from exc
    except UnexpectedCharacters as exc:
        at = cast("int", exc.pos_in_stream)  # lark declares it as None
        raise SelectorError(expression, at, describe_error(expression, at)) from exc
    except UnexpectedToken as exc:
        # At the end of the text report the position after the last token: that is where something is missing.
        at = (exc.token.end_pos or 0) if exc.token.type == "$END" else exc.token.start_pos or 0
        raise SelectorError(expression, at, describe_error(expression, at, str(exc.token.value), exc.accepts)) from exc


_START = re.compile(r"'|/\*|--")
_LINE_END = re.compile(r"[\n\r]")


def _without_line_comments(expression: str) -> str:
    """Return the expression with spaces instead of comments of the form ``-- text``, which end with their line.

    As a terminal of the grammar such a comment takes quadratic time: in a line without an end, the lexer would look for
    the end at each ``--``. There two minuses are two minuses.
    """
    parts: list[str] = []
    kept = at = 0
    while (start := _START.search(expression, at)) is not None:
        if start[0] == "--":
            end = _LINE_END.search(expression, start.end())
            if end is None:
                break
            parts += (expression[kept : start.start()], " " * (end.start() - start.start()))
            kept = at = end.start()
        else:
            close = "'" if start[0] == "'" else "*/"
            at = expression.find(close, start.end()) + len(close)
            if at < start.end() + len(close):
                break  # it has no end: the parser reports that
    return "".join((*parts, expression[kept:]))


@cache
def _parser() -> Lark:
    """Return the parser. It builds expressions while it parses, without a tree, so nesting needs no recursion."""
    return Lark(
        GRAMMAR, parser="lalr", lexer="basic", transformer=_Builder(), lexer_callbacks={"NAME": _keyword_or_name}
    )


def _keyword_or_name(word: Token) -> Token:
    keyword = _KEYWORDS.get(word.upper())
    return Token.new_borrow_pos(keyword, str(word), word) if keyword else word


def _at(token: Token) -> int:
    return token.start_pos or 0


def _unquote(token: Token) -> str:
    return token[1:-1].replace("''", "'")


@v_args(inline=True)
class _Builder(Transformer[Token, Expression]):
    """Builder of expressions, with one method for each rule of the grammar."""

    start = staticmethod(expressions.as_condition)
    any_of = staticmethod(expressions.any_of)
    all_of = staticmethod(expressions.all_of)
    equal = staticmethod(expressions.equal)
    unequal = staticmethod(expressions.unequal)
    compared = staticmethod(expressions.compared)

    def is_null(self, operand: Expression, negation: Token | None, _: Token) -> Expression:
        condition = expressions.is_null(operand)
        return condition if negation is None else expressions.negated(condition, operand.at)

    def tested(self, operand: Expression, negation: Token | None, test: Token, text: Token) -> Expression:
        return expressions.tested(operand, test.upper(), _unquote(text), expected=negation is None)

    def between(self, operand: Expression, negation: Token | None, low: Expression, high: Expression) -> Expression:
        return (expressions.between if negation is None else expressions.not_between)(operand, low, high)

    def is_in(self, operand: Expression, negation: Token | None, texts: list[str]) -> Expression:
        return expressions.is_in(operand, texts, expected=negation is None)

    def strings(self, *texts: Token) -> list[str]:
        return [_unquote(text) for text in texts]

    def negative(self, minus: Token, operand: Expression) -> Expression:
        return expressions.negative(operand, _at(minus))

    def negated(self, word: Token, operand: Expression) -> Expression:
        return expressions.negated(operand, _at(word))

    def string(self, token: Token) -> Expression:
        return expressions.constant(_unquote(token), ValueType.STRING, _at(token))

    def whole_number(self, token: Token) -> Expression:
        digits = token.rstrip("lL")
        if len(digits) > len(str(LONG_MAX)) or int(digits) > LONG_MAX:
            raise OperandError(
                _at(token), f"integers go up to {LONG_MAX}; write a larger number with an exponent, as in 1e19"
            )
        number = int(digits)
        return expressions.constant(number, ValueType.INTEGER if number <= INT_MAX else ValueType.LONG, _at(token))

    def decimal_number(self, token: Token) -> Expression:
        number = float(token)
        if number == 0 or math.isinf(number):
            raise OperandError(
                _at(token), "a decimal number must be 4.9e-324..1.7976931348623157e308; for zero write 0, without a dot"
            )
        return expressions.constant(number, ValueType.DOUBLE, _at(token))

    def boolean(self, token: Token) -> Expression:
        return expressions.constant(token.upper() == "TRUE", ValueType.BOOLEAN, _at(token))

    def null(self, token: Token) -> Expression:
        return expressions.constant(None, ValueType.NULL, _at(token))

    def property_named(self, token: Token) -> Expression:
        return expressions.property_named(str(token), _at(token))
