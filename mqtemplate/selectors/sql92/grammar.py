"""From text to parts: the grammar of RocketMQ's selectors.

Source: RocketMQ ``filter: parser/SelectorParser.jj``. As there, what a word is does not depend on what stands
around it, the longest match wins, and a number may touch the keyword behind it: ``a = 1and b = 2``.
"""

from __future__ import annotations

import math
from functools import cache
from typing import cast

from lark import Lark, Token, Transformer, UnexpectedCharacters, UnexpectedToken, v_args

from mqtemplate.errors import SelectorError
from mqtemplate.selectors.sql92 import parts
from mqtemplate.selectors.sql92.mistakes import reason_for
from mqtemplate.selectors.sql92.parts import Part, RefusedError
from mqtemplate.selectors.sql92.values import Evaluate, Kind

MAX_LENGTH = 32_768
"""Characters: a list of some thousand texts. Reading them takes a fraction of a second."""

GRAMMAR = r"""
start: disjunction

?disjunction: conjunction
    | conjunction (_OR conjunction)+ -> any_of
?conjunction: equality
    | equality (_AND equality)+ -> all_of

?equality: comparison
    | equality _EQUAL comparison -> equal
    | equality _UNEQUAL comparison -> unequal
    | equality _IS NULL -> is_null
    | equality _IS NOT NULL -> is_not_null

?comparison: unary
    | comparison ORDER unary -> compared
    | comparison TEST STRING -> tested
    | comparison NOT TEST STRING -> not_tested
    | comparison _BETWEEN unary _AND unary -> between
    | comparison NOT _BETWEEN unary _AND unary -> not_between
    | comparison _IN texts -> is_in
    | comparison NOT _IN texts -> is_not_in
texts: "(" STRING ("," STRING)* ")"

?unary: primary
    | "+" unary
    | MINUS unary -> negative
    | NOT unary -> negated

?primary: STRING -> text
    | WHOLE -> whole_number
    | FRACTION -> fraction
    | TRUE -> truth
    | FALSE -> truth
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
LINE_COMMENT.1: /--[^\n\r]*(?:\r\n|\n|\r)/
BLOCK_COMMENT.1: /\/\*(?:[^*]|\*(?!\/))*\*\//
%ignore BLANKS
%ignore LINE_COMMENT
%ignore BLOCK_COMMENT
"""

_KEYWORDS = {
    **{word: word for word in ("NOT", "TRUE", "FALSE", "NULL")},
    **{word: f"_{word}" for word in ("AND", "OR", "BETWEEN", "IN", "IS")},
    **dict.fromkeys(("CONTAINS", "STARTSWITH", "ENDSWITH"), "TEST"),
}

_INT_MAX = (1 << 31) - 1
_LONG_MAX = (1 << 63) - 1


def compile_expression(expression: str) -> Evaluate:
    """Read an expression, once for all messages.

    Returns:
        From a message's properties to True, False, or None for NULL. It raises `NotComparableError`.

    Raises:
        SelectorError: The text is no expression; see `Sql92Selector`.
    """
    if len(expression) > MAX_LENGTH:
        raise SelectorError(
            expression, MAX_LENGTH, f"it has {len(expression)} characters, allowed are {MAX_LENGTH}; use several groups"
        )
    try:
        return cast("Part", _parser().parse(expression)).evaluate
    except RefusedError as exc:
        raise SelectorError(expression, exc.at, exc.reason) from exc
    except UnexpectedCharacters as exc:
        at = cast("int", exc.pos_in_stream)  # the library declares it as None
        raise SelectorError(expression, at, reason_for(expression, at)) from exc
    except UnexpectedToken as exc:
        # What is missing at the end is missing right behind the last word.
        at = (exc.token.end_pos or 0) if exc.token.type == "$END" else exc.token.start_pos or 0
        raise SelectorError(expression, at, reason_for(expression, at, str(exc.token.value), exc.accepts)) from exc


@cache
def _parser() -> Lark:
    """Reads while it parses, without a tree between, so that no depth of parentheses is a depth of calls."""
    return Lark(
        GRAMMAR, parser="lalr", lexer="basic", transformer=_Reader(), lexer_callbacks={"NAME": _keyword_or_name}
    )


def _keyword_or_name(word: Token) -> Token:
    keyword = _KEYWORDS.get(word.upper())
    return Token.new_borrow_pos(keyword, str(word), word) if keyword else word


def _at(token: Token) -> int:
    return token.start_pos or 0


def _decoded(token: Token) -> str:
    return token[1:-1].replace("''", "'")


@v_args(inline=True)
class _Reader(Transformer[Token, Part]):
    """One method for each rule of the grammar, named as it is named there."""

    def start(self, part: Part) -> Part:
        return parts.as_condition(part)

    def any_of(self, *conditions: Part) -> Part:
        return parts.any_of(conditions)

    def all_of(self, *conditions: Part) -> Part:
        return parts.all_of(conditions)

    def equal(self, left: Part, right: Part) -> Part:
        return parts.equal(left, right)

    def unequal(self, left: Part, right: Part) -> Part:
        return parts.negated(parts.equal(left, right), left.at)

    def is_null(self, part: Part, _: Token) -> Part:
        return parts.is_null(part)

    def is_not_null(self, part: Part, _: Token, __: Token) -> Part:
        return parts.negated(parts.is_null(part), part.at)

    def compared(self, left: Part, sign: Token, right: Part) -> Part:
        return parts.compared(str(sign), left, right)

    def tested(self, part: Part, test: Token, text: Token) -> Part:
        return parts.tested(test.upper(), part, _decoded(text), wanted=True)

    def not_tested(self, part: Part, _: Token, test: Token, text: Token) -> Part:
        return parts.tested(test.upper(), part, _decoded(text), wanted=False)

    def between(self, part: Part, low: Part, high: Part) -> Part:
        return parts.between(part, low, high)

    def not_between(self, part: Part, _: Token, low: Part, high: Part) -> Part:
        return parts.not_between(part, low, high)

    def is_in(self, part: Part, texts: list[str]) -> Part:
        return parts.is_in(part, texts, wanted=True)

    def is_not_in(self, part: Part, _: Token, texts: list[str]) -> Part:
        return parts.is_in(part, texts, wanted=False)

    def texts(self, *texts: Token) -> list[str]:
        return [_decoded(text) for text in texts]

    def negative(self, minus: Token, part: Part) -> Part:
        return parts.negative(part, _at(minus))

    def negated(self, word: Token, part: Part) -> Part:
        return parts.negated(part, _at(word))

    def text(self, token: Token) -> Part:
        return parts.constant(_decoded(token), Kind.TEXT, _at(token))

    def whole_number(self, token: Token) -> Part:
        digits = token.rstrip("lL")
        if len(digits) > len(str(_LONG_MAX)) or int(digits) > _LONG_MAX:
            raise RefusedError(_at(token), f"whole numbers go up to {_LONG_MAX}; write a larger one as 1e19")
        number = int(digits)
        return parts.constant(number, Kind.INTEGER if number <= _INT_MAX else Kind.LONG, _at(token))

    def fraction(self, token: Token) -> Part:
        number = float(token)
        if number == 0 or math.isinf(number):
            raise RefusedError(
                _at(token),
                "a fraction lies between 4.9e-324 and 1.7976931348623157e308; for zero write 0, without a dot",
            )
        return parts.constant(number, Kind.DOUBLE, _at(token))

    def truth(self, token: Token) -> Part:
        return parts.constant(token.upper() == "TRUE", Kind.BOOLEAN, _at(token))

    def null(self, token: Token) -> Part:
        return parts.constant(None, Kind.NOTHING, _at(token))

    def property_named(self, token: Token) -> Part:
        return parts.property_named(str(token), _at(token))
