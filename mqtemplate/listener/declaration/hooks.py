"""Functions of the application that may change the attributes of a listener: enhancers, and ``prepare_start``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from mqtemplate.callables import refuse_bare
from mqtemplate.errors import ListenerError
from mqtemplate.listener.declaration.attributes import ListenerDecorator, ListenerSpec, check_handler
from mqtemplate.listener.declaration.decorator import MESSAGE_LISTENER

ENHANCER_ATTRIBUTE = "__mqtemplate_listener_enhancer__"
"""Attribute of a decorated function or class that holds its order."""

Enhancer = Callable[[dict[str, Any], object], Mapping[str, Any] | None]
"""Function (attributes, listener) -> attributes. It may change the given dict and return None."""

_Target = TypeVar("_Target", bound=Callable[..., object])
_OWN = ("topic", "consumer_group")


def listener_enhancer(_bare: None = None, /, *, order: int = 0) -> Callable[[_Target], _Target]:
    """Mark a function, or a class with ``__call__``, that may change the attributes of each listener.

    ::

        @listener_enhancer()
        def in_test_groups(attributes: dict[str, Any], listener: object) -> None:
            attributes["consumer_group"] += "-test"

    The dict has ``topic`` (a list), ``consumer_group``, and the attributes that the decorator names, with their
    placeholders; further attributes may be added. The second argument is the decorated function or class. The
    application builds a class by the types of its constructor.

    Args:
        order: Lower numbers are called first; equal ones in the order of the components.
    """

    refuse_bare("@listener_enhancer", _bare, "@listener_enhancer()", ListenerError)

    def mark(target: _Target) -> _Target:
        setattr(target, ENHANCER_ATTRIBUTE, order)
        return target

    return mark


def enhancer_order(target: object) -> int | None:
    """Return the order of a marked function or class; None for anything else."""
    order: int | None = getattr(target, "__dict__", {}).get(ENHANCER_ATTRIBUTE)
    return order


def enhanced(spec: ListenerSpec, listener: object, enhancers: Iterable[Enhancer]) -> ListenerSpec:
    """Return the spec after all enhancers.

    Raises:
        ListenerError: An enhancer returned something else than attributes, or an unknown attribute.
    """
    attributes: dict[str, Any] = {
        "topic": list(spec.topics),
        "consumer_group": spec.consumer_group,
        **spec.attributes,
    }
    for enhance in enhancers:
        attributes = _after(enhance, attributes, listener)
    topic, group = (attributes[name] for name in _OWN)
    own = {name: value for name, value in attributes.items() if name not in _OWN}
    return replace(spec, topics=MESSAGE_LISTENER.topics_of(topic), consumer_group=group, attributes=own)


def _after(enhance: Enhancer, attributes: dict[str, Any], listener: object) -> dict[str, Any]:
    name = getattr(enhance, "__qualname__", type(enhance).__qualname__)
    given: object = enhance(attributes, listener)
    result = attributes if given is None else given
    if not isinstance(result, Mapping) or any(part not in result for part in _OWN):
        raise ListenerError(
            f"the enhancer {name} returned {result!r:.200}; return the attributes, a dict with 'topic' and "
            "'consumer_group', or change the given dict and return None"
        )
    try:
        MESSAGE_LISTENER.check_names([part for part in result if part not in _OWN])
    except TypeError as exc:
        raise ListenerError(f"the enhancer {name}: {exc}") from exc
    return dict(result)


Prepare = Callable[["PreparedConsumer"], object]
_HOOK = "prepare_start"


class PreparedConsumer:
    """Attributes of one listener, with their placeholders replaced and its defaults. They can be set.

    ::

        def prepare_start(self, consumer: PreparedConsumer) -> None:
            consumer.consume_from_where = "CONSUME_FROM_TIMESTAMP"
            consumer.consume_timestamp = self.clock.now_ms() - 3_600_000

    A value is checked when it is set. `topic` and `consumer_group` can be read only.

    Attributes:
        topic: Topics of the listener.
        consumer_group: Its group.
    """

    topic: tuple[str, ...]
    consumer_group: str
    _decorator: ListenerDecorator

    def __init__(
        self,
        listener: str,
        topics: tuple[str, ...],
        group: str,
        values: dict[str, Any],
        decorator: ListenerDecorator,
    ) -> None:
        # Not by assignment: `__setattr__` sets attributes of the listener.
        vars(self).update(topic=topics, consumer_group=group, _listener=listener, _values=values, _decorator=decorator)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._listener})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(f"a listener has no attribute {name!r}; it has {', '.join(self._values)}")
        return self._values[name]

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("topic", "consumer_group"):
            raise ListenerError(
                f"{self._listener}: {_HOOK} cannot change {name}; an enhancer can: @listener_enhancer()"
            )
        self._decorator.check_names([name])
        self._values[name] = self._decorator.read_value(self._listener, name, value)


def hook_of(target: object) -> Prepare | None:
    """Return the method ``prepare_start`` of a listener object, if it has one.

    Raises:
        ListenerError: It is ``async``, or takes no consumer.
    """
    hook = getattr(target, _HOOK, None) if hasattr(type(target), _HOOK) else None
    if not callable(hook):
        return None
    title = f"{type(target).__qualname__}.{_HOOK}"
    check_handler(hook, title)
    if inspect.iscoroutinefunction(hook):
        raise ListenerError(f"{title} is 'async def', and the listener waits for its result; write 'def'")
    try:
        inspect.signature(hook).bind(object())
    except TypeError as exc:
        raise ListenerError(f"{title} is called with the consumer: {exc}; write 'def {_HOOK}(self, consumer)'") from exc
    prepare: Prepare = hook
    return prepare
