"""Creation of a selector from its type and its expression."""

from __future__ import annotations

from mqtemplate.selectors.sql92.selector import Sql92Selector
from mqtemplate.selectors.tags import Selector, SelectorType, tag_selector


def make_selector(selector_type: SelectorType, expression: str) -> Selector:
    """Create the selector of this type.

    Raises:
        ListenerError: The expression is invalid; for SQL92 a `SelectorError`, which names the column.
    """
    return Sql92Selector(expression) if selector_type is SelectorType.SQL92 else tag_selector(expression)
