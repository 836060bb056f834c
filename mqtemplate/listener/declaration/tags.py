"""``@on_tag``: methods of one listener class that handle the messages of their tags."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mqtemplate.callables import lazy_kind, name_of_callable, own_mark, refuse_bare
from mqtemplate.errors import ListenerError
from mqtemplate.selectors.tags import tag_problem

TAGS_ATTRIBUTE = "__mqtemplate_tags__"
"""Attribute of a decorated method that holds its tags."""

_Target = TypeVar("_Target", bound=Callable[..., object])


def on_tag(*tags: str) -> Callable[[_Target], _Target]:
    """Make a method of a listener class the handler of the messages with these tags.

    ::

        @message_listener("orders", "billing")
        class Billing:
            @on_tag("paid")
            def paid(self, payment: Payment) -> None: ...

            @on_tag("refunded", "returned")
            def refunded(self, refund: Refund) -> None: ...

    The listener subscribes to these tags. A method ``on_message`` beside them gets all other messages; then the
    listener subscribes to all of them.

    Raises:
        ListenerError: A tag is empty, or named twice.
    """
    refuse_bare("@on_tag", next(iter(tags), None), "@on_tag('paid')", ListenerError)
    if not tags or not all(map(_is_tag, tags)):
        raise ListenerError(f'@on_tag: tags must be names, got {tags!r}; write @on_tag("paid", "refunded")')

    def mark(target: _Target) -> _Target:
        if not inspect.isfunction(target):
            raise ListenerError(f"@on_tag: {target!r} is not a method; decorate a method of a listener class")
        if (kind := lazy_kind(target)) is not None:
            raise ListenerError(
                f"@on_tag: {name_of_callable(target)} has a 'yield' ({kind}), so a call of it runs nothing; "
                "write 'return'"
            )
        setattr(target, TAGS_ATTRIBUTE, tags)
        return target

    return mark


def _is_tag(tag: object) -> bool:
    return isinstance(tag, str) and tag_problem(tag) is None


def has_tag_methods(kind: type) -> bool:
    """Return True if a method of the class, or of a base class, is marked ``@on_tag``."""
    return any(own_mark(member, TAGS_ATTRIBUTE) for member in _members(kind).values())


def tag_methods(target: object) -> dict[str, Callable[..., object]]:
    """Return the methods of a listener object by their tags.

    Raises:
        ListenerError: Two methods have the same tag.
    """
    found: dict[str, Callable[..., object]] = {}
    kind = type(target)
    for name, member in _members(kind).items():
        for tag in own_mark(member, TAGS_ATTRIBUTE) or ():
            if tag in found:
                raise ListenerError(
                    f"{kind.__qualname__}: {getattr(found[tag], '__name__', tag)} and {name} both handle the tag "
                    f"{tag!r}; give each tag one method"
                )
            found[tag] = getattr(target, name)
    return found


def has_tags(handler: object) -> bool:
    """Return True for a method marked ``@on_tag``."""
    return hasattr(handler, TAGS_ATTRIBUTE)


def is_of_class(handler: object) -> bool:
    """Return True for a method by which a class is a listener: ``on_message``, or one marked ``@on_tag``."""
    is_method = getattr(handler, "__self__", None) is not None
    return is_method and (getattr(handler, "__name__", "") == "on_message" or has_tags(handler))


def _members(kind: type) -> dict[str, Any]:
    """Return the members of a class by name; members of a subclass replace members of its bases."""
    return {name: member for base in reversed(kind.__mro__) for name, member in vars(base).items()}


def tag_expression(listener: str, routes: Mapping[str, object], given: str, has_other: bool) -> str:
    """Return the selector expression of a class with tag methods.

    Raises:
        ListenerError: The decorator selects other tags than the methods have.
    """
    if given == "*":
        return given if has_other else " || ".join(routes)
    selected = {tag.strip() for tag in given.split("||")}
    if unreachable := sorted(set(routes) - selected):
        raise ListenerError(
            f"{listener}: selector_expression={given!r} does not select {', '.join(map(repr, unreachable))}, for which "
            "there is a method; add it, or leave selector_expression out"
        )
    return given
