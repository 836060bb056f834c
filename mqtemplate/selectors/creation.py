"""Creation of a selector from the type and the expression that a user wrote."""

from __future__ import annotations

import re
from typing import Any

from mqtemplate.errors import ListenerError, SelectorError
from mqtemplate.selectors.sql92.selector import Sql92Selector
from mqtemplate.selectors.tags import Selector, SelectorType, tag_selector
from mqtemplate.user_code import shown

_NAME_ALONE = re.compile(r"[\s(]*(?!(?i:true|false|null)\b)([A-Za-z_$][\w$]*)[\s)]*", re.ASCII)


def make_selector(selector_type: SelectorType, expression: str) -> Selector:
    """Create the selector of this type.

    An expression that can match no message is an error here, since a listener with it would be silent. The classes of
    the selectors allow it: clients of RocketMQ may send it.

    Raises:
        ListenerError: The expression is invalid, or matches no message; for SQL92 a `SelectorError`, which names the
            column.
    """
    if not isinstance(expression, str):
        raise ListenerError(
            f"selector expression must be text such as 'a || b', got {type(expression).__name__} {shown(expression)}"
        )
    if selector_type is not SelectorType.SQL92:
        return tag_selector(expression)
    if (surrogate := re.search("[\ud800-\udfff]", expression)) is not None:
        raise SelectorError(expression, surrogate.start(), "a surrogate is no character; write the character itself")
    selector = Sql92Selector(expression)
    if (name := _NAME_ALONE.fullmatch(expression)) is not None:
        raise SelectorError(
            expression,
            name.start(1),
            f"a property alone matches no message; compare it, as in {name[1]} = 'north'; for the tag {name[1]} use "
            "the selector type TAG",
        )
    properties = _Watched()
    if not selector.matches(properties) and not properties.are_read:
        raise SelectorError(
            expression, 0, "it matches no message, whatever its properties; compare a property, as in region = 'north'"
        )
    return selector


class _Watched(dict[str, str]):
    """Properties of no message, which note that a condition reads them."""

    are_read = False

    def get(self, name: str, default: Any = None) -> Any:
        self.are_read = True
        return default
