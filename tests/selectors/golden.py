"""SQL92 expressions and RocketMQ's results for them: the reader and the generator of `golden.jsonl`.

The results come from RocketMQ 5.5.0, which `Oracle.java` calls. No test runs that program. To create the file
again, for example with more `CHOSEN` expressions, install RocketMQ's packages into ``.rocketmq/lib`` (``make setup``)
and run::

    python -m tests.selectors.golden > tests/selectors/golden.jsonl
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("golden.jsonl")

ABSENT = None
VALUES = [
    ABSENT, "", "1", "5", "10", "-5", "+5", "05", " 5", "5.5", "5.0", "1e1", "5d", "0x1p3", ".5", "5.", "NaN",
    "-Infinity", "inf", "1_0", "-0.0", "0", "0.0", "2147483647", "2147483648", "-2147483648", "-2147483649",
    "9223372036854775807", "9223372036854775808", "9007199254740993", "1e400", "1e-400", "true", "TRUE", "True",
    "false", "x", "north", "it's", "\N{ARABIC-INDIC DIGIT FIVE}", "\N{FULLWIDTH DIGIT FIVE}",
    "\N{MATHEMATICAL BOLD DIGIT FIVE}", "\t5\n", "0x5", "5L", "--5",
]  # fmt: skip
CHOSEN = [
    # expressions that the generator rarely creates
    "", " ", "*", "TRUE", "NULL", "a", "1", "'x'", "-1", "NOT a", "NOT NULL", "NOT 1", "a = b", "a <> b", "a < b",
    "a >= b", "-a = 5", "-a > 5", "a = -5", "a = - -5", "a = +5", "+a IN ('5')", "(a) IN ('5')", "-a IN ('5')",
    "1 IN ('1')", "a IN (1)", "a IN ()", "a IN ('5',)", "a IN ('1', '5', 'x', '10', '-5', '05')",
    "a NOT IN ('5', 'x')", "a IN ('it''s')", "a = ''", "a = ''''", "a = '\\''", "a = 'it''s'", "a CONTAINS ''",
    "a NOT CONTAINS ''", "a CONTAINS '5'", "a NOT CONTAINS '5'", "a STARTSWITH '5'", "a NOT ENDSWITH '5'",
    "a ENDSWITH '5'", "a NOT STARTSWITH '5'", "1 CONTAINS '1'", "(a = 5) CONTAINS '1'", "a CONTAINS b",
    "NULL CONTAINS 'x'", "a contains '5' or A = 5", "a = TRUE", "TRUE = a", "a <> FALSE", "FALSE = a OR TRUE",
    "1 = TRUE", "TRUE = 1", "TRUE = FALSE", "TRUE = 'true'", "'true' = TRUE", "a = NULL", "NULL = a", "a = -NULL",
    "-NULL = a", "a IS NULL", "a IS NOT NULL", "NULL IS NULL", "1 IS NULL", "(a = 5) IS NULL", "a = 5 IS NULL",
    "a = b IS NOT NULL", "a = 5 = TRUE", "a = 5 = 5", "a = b = c", "NOT a = 5", "NOT (a = 5)", "NOT a > 5",
    "NOT (a > 5)", "NOT NOT (a > 5)", "NOT a IS NULL", "a > 5 > 3", "a > '5'", "'5' > a", "a > TRUE", "a > NULL",
    "a > -'5'", "-(a = 5) > 1", "b > -(a = 5)", "-TRUE > a", "a BETWEEN 1 AND 10", "a BETWEEN 10 AND 1",
    "a BETWEEN -1 AND -10", "a BETWEEN 5 AND 5", "a BETWEEN 1 AND 10.5", "a BETWEEN 10.5 AND 10",
    "a BETWEEN 'a' AND 'b'", "a BETWEEN NULL AND 5", "a BETWEEN b AND c", "a NOT BETWEEN 1 AND 10",
    "a NOT BETWEEN 10 AND 1", "a NOT BETWEEN b AND 5", "5 BETWEEN a AND b", "a BETWEEN 1 AND 5 AND b = 5",
    "a BETWEEN TRUE AND FALSE", "a BETWEEN 9007199254740993 AND 9007199254740992.0",
    "9007199254740993 = 9007199254740992.0", "a = 0", "a = 0.0", "a = -0.0", "a = .5", "a = 5.", "a = 5.e0",
    "a = 5E0", "a = 5e+0", "a = 1e400", "a = 1e-400", "a = 1e-323", "a = 0L", "a = 5L", "a = 5l", "a > 5L", "a = 007",
    "a = 0x5", "a = 5d", "a = 2147483647", "a = 2147483648", "a > -2147483648", "a > -2147483649",
    "a = 9223372036854775807", "a = 9223372036854775808", "a = -9223372036854775808", "a = 9223372036854775807L",
    "a < 9223372036854775807.0", "a > 5.5", "a < 5.0", "5 < a", "5.0 >= a", "a = 1and b = 5", "a=5 OR(b=5)",
    "a = 5or b = 5", "a = 5 -- c", "a = 5 -- c\n", "a = -- c\n 5", "a = --5", "a = /* c */ 5",
    "a /***/ = /* * / **/ 5", "a = /* 5", "a = 5 /*", "a\t=\f5\r\n", "a\v= 5", "a\N{NO-BREAK SPACE}= 5", "a == 5",
    "a != 5", "a => 5", "a =< 5", "a > = 5", "a < > 5", "a && b", "a = 5 && b = 5", "a = 5 || b = 5", 'a = "x"',
    "a LIKE 'x%'", "a = 5 LIKE 'x'", "a = 5 b = 5", "a = 5)", "(a = 5", "((a = 5))", "a = 5 OR", "AND", "a AND",
    "a and not b", "a + 1 = 5", "a - 1 = 5", "a * 2 > 5", "a.b = 5", "a-b = 5", "_a = 5", "$a = 5", "a$ = 5",
    "5a = 5", "ä = 5", "is = 5", "in = 5", "TAGS = 'x'", "tags = 'x'", "a IS 5", "a NOT b", "a NOT = 5",
    "a BETWEEN 1", "a BETWEEN 1 OR 2", "a IS NOT 5", "IS NULL", "= 5", "'x = 5", "a = 'x'y", "a = 5;", "now > 5",
    "a = 5 OR b = 5", "b = 5 OR a = 5", "a = 5 AND b = 5", "FALSE AND a = 5", "TRUE OR a = 5", "NULL AND FALSE",
    "NULL OR TRUE", "NOT (NULL AND a)", "a ENDS WITH 'x'", "a \N{LATIN SMALL LETTER DOTLESS I}s NULL",
    "a I\N{LATIN SMALL LETTER LONG S} NULL", "a = 'ü\N{GRINNING FACE}'", "a = 5 OR b BETWEEN 5 AND",
]  # fmt: skip


class Golden(NamedTuple):
    """Results of RocketMQ for one expression.

    Attributes:
        answers: One letter for each of `messages`: true, false, null, error; None if the expression is refused.
        ignores_the_rest: RocketMQ stopped after a complete condition and ignored the text that follows.
        column: Column of the unexpected token that the parser reported; None if it reported none.
    """

    expression: str
    answers: str | None = None
    refused: bool = False
    ignores_the_rest: bool = False
    column: int | None = None


def messages() -> list[dict[str, str]]:
    """Return messages with the properties a, b and c: each value once as a, the others at random."""
    chance = random.Random(92)
    rows = [(value, chance.choice(VALUES), chance.choice(VALUES)) for value in VALUES]
    return [{name: value for name, value in zip("abc", row, strict=True) if value is not None} for row in rows]


def golden() -> list[Golden]:
    """Return all cases of the golden file."""
    return [Golden(**json.loads(line)) for line in GOLDEN.read_text(encoding="utf-8").splitlines()]


class _Generator:
    """Generator of random expressions. About one token in forty is missing, repeated or replaced."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def expression(self) -> str:
        words = self._condition(self._chance.randint(0, 3)).split(" ")
        if self._chance.random() < 0.2:
            at = self._chance.randrange(len(words))
            words[at : at + 1] = self._chance.choice(
                [[], [words[at]] * 2, [self._chance.choice(words)], ["NOT", words[at]]]
            )
        return " ".join(words)

    def _one_of(self, *choices: str) -> str:
        return self._chance.choice(choices)

    def _text(self) -> str:
        return "'" + (self._chance.choice(VALUES) or "").replace("'", "''") + "'"

    def _number(self) -> str:
        return self._one_of("5", "10", "1", "0", "5.5", "5.0", "1e1", "2147483648", "9007199254740993", ".5", "7L")

    def _name(self) -> str:
        return self._one_of("a", "b", "c", "a")

    def _value(self) -> str:
        kind = self._chance.random()
        if kind < 0.1:
            return f"{self._one_of('-', '+', '- ')}{self._value()}"
        if kind < 0.15:
            return self._one_of("TRUE", "FALSE", "NULL", "( a = 5 )")
        return self._name() if kind < 0.5 else self._number() if kind < 0.85 else self._text()

    def _condition(self, depth: int) -> str:
        if depth == 0:
            return self._comparison()
        one, other = self._condition(depth - 1), self._condition(self._chance.randrange(depth))
        return self._one_of(
            f"{one} AND {other}", f"{one} or {other}", f"( {one} ) OR ( {other} )", f"NOT ( {one} )", one
        )

    def _comparison(self) -> str:
        name, maybe = self._name(), self._one_of("", "NOT ")
        bounds = f"{self._number()} AND {self._number()}"
        texts = " , ".join(self._text() for _ in range(self._chance.randint(1, 6)))
        return self._one_of(
            f"{name} {self._one_of('=', '<>', '<', '<=', '>', '>=')} {self._number()}",
            f"{name} {self._one_of('=', '<>')} {self._text()}",
            f"{self._value()} {self._one_of('=', '<>', '<', '<=', '>', '>=')} {self._value()}",
            f"{name} {maybe}BETWEEN {bounds}",
            f"{self._value()} {maybe}between {self._value()} AND {self._value()}",
            f"{name} {maybe}IN ( {texts} )",
            f"{name} {maybe}{self._one_of('CONTAINS', 'STARTSWITH', 'ENDSWITH')} {self._text()}",
            f"{self._value()} IS {maybe}NULL",
        )


def expressions(count: int, seed: int) -> list[str]:
    """Return the chosen expressions and *count* random ones."""
    generator = _Generator(seed)
    return list(dict.fromkeys([*CHOSEN, *(generator.expression() for _ in range(count))]))


def run_oracle(texts: list[str]) -> str:
    """Return the output of `Oracle.java` for these expressions."""
    command = ["java", "-cp", str(ROOT / ".rocketmq" / "lib" / "*"), str(Path(__file__).with_name("Oracle.java"))]
    lines = "\n".join(map(json.dumps, [messages(), *texts]))
    return subprocess.run(command, input=lines, capture_output=True, text=True, check=True, encoding="utf-8").stdout


if __name__ == "__main__":
    sys.stdout.write(run_oracle(expressions(500, seed=7)))
