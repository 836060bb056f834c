"""Selectors as users write them: the results of expressions, and the texts of errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqtemplate.errors import ListenerError, SelectorError
from mqtemplate.selectors.sql92 import Sql92Selector, make_selector
from mqtemplate.selectors.tags import SelectorType
from tests.golden import check_script, scripts_in

ORDER = {"TAGS": "paid", "KEYS": "4711", "region": "north", "price": "15", "weight": "2.5", "urgent": "true"}


class Selectors:
    """The commands of the scripts. An expression is one word, with the escapes of Python."""

    def order(self, *words: str, **options: str) -> Iterator[str]:
        """Print True if an expression matches the order."""
        (expression,) = _texts(words, options)
        yield str(Sql92Selector(expression).matches(ORDER))

    def value(self, *words: str, **options: str) -> Iterator[str]:
        """Print True if an expression matches a message whose property ``a`` has a value."""
        value, expression = _texts(words, options)
        yield str(Sql92Selector(expression).matches({"a": value}))

    def error(self, *words: str, **options: str) -> Iterator[str]:
        """Print the column and the reason of the error of an expression."""
        (expression,) = _texts(words, options)
        with pytest.raises(SelectorError) as caught:
            Sql92Selector(expression)
        error = caught.value
        assert str(error) == f"SQL92 expression {expression!r}, column {error.column}: {error.reason}"
        yield f"column {error.column}: {error.reason}"

    def tags(self, *words: str, **options: str) -> Iterator[str]:
        """Print the tags that an expression selects, or the error."""
        yield from _created(SelectorType.TAG, *_texts(words, options), lambda selector: sorted(selector.tags) or "all")

    def sql92(self, *words: str, **options: str) -> Iterator[str]:
        """Print that a condition is allowed, or the error."""
        yield from _created(SelectorType.SQL92, *_texts(words, options), lambda selector: "allowed")


def _texts(words: tuple[str, ...], options: dict[str, str]) -> list[str]:
    """Return the words of a command: one with a ``=`` is an expression, too."""
    texts = [*words, *(f"{name}={value}" for name, value in options.items())]
    return [text.encode().decode("unicode_escape") for text in texts]


def _created(kind: SelectorType, expression: str, shown: Callable[..., object]) -> Iterator[str]:
    try:
        yield str(shown(make_selector(kind, expression)))
    except ListenerError as exc:
        yield str(exc)


@pytest.mark.parametrize("script", scripts_in(Path(__file__).with_name("scripts")), ids=lambda path: path.stem)
def test_selectors_do_what_the_script_says(script: Path) -> None:
    check_script(script, Selectors())
