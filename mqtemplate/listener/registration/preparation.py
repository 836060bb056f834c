"""The hook ``prepare_start`` of a listener: it may change the listener's attributes before it joins its group.

Source: ``rocketmq-spring: RocketMQPushConsumerLifecycleListener.prepareStart``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from mqtemplate.errors import ListenerError
from mqtemplate.listener.attributes import ListenerDecorator, check_handler

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
        own = {
            "topic": topics,
            "consumer_group": group,
            "_listener": listener,
            "_values": values,
            "_decorator": decorator,
        }
        for name, value in own.items():
            object.__setattr__(self, name, value)

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
    """Return the method ``prepare_start`` of a listener object; None if it has none.

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
