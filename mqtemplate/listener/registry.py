"""All listeners of an application: checked against each other, started in order, stopped in reverse."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import structlog

from mqtemplate.broker import Broker
from mqtemplate.converter import MessageConverter
from mqtemplate.errors import ListenerError
from mqtemplate.listener.consuming.async_loop import LoopThread, PrivateLoop
from mqtemplate.listener.consuming.container import ListenerContainer
from mqtemplate.listener.endpoint import Endpoint, make_endpoints
from mqtemplate.listener.resolution import ListenerSettings, Resolve, default_resolve
from mqtemplate.selectors.tags import SelectorType, TagSelector

IsEnabled = Callable[[str, str], bool]
"""Whether configuration lets a listener run: (group, topic) -> bool."""

_log = structlog.stdlib.get_logger("mqtemplate.listener")


class ListenerRegistry:
    """Holds a container for each listener.

    Args:
        resolve: Fills the placeholders of the decorators in.
        is_enabled: Switches single listeners off, as ``rocketmq.consumer.listeners.<group>.<topic>: false`` does.
            A listener of several topics loses the one that is off.
    """

    def __init__(
        self,
        broker: Broker,
        converter: MessageConverter,
        *,
        resolve: Resolve = default_resolve,
        is_enabled: IsEnabled = lambda _group, _topic: True,
    ) -> None:
        self._broker = broker
        self._converter = converter
        self._resolve = resolve
        self._is_enabled = is_enabled
        self._loop = PrivateLoop() if broker.clock.is_virtual else LoopThread()
        self._containers: dict[str, ListenerContainer] = {}

    @property
    def containers(self) -> Sequence[ListenerContainer]:
        """In the order of their registration; listeners that are switched off have none."""
        return tuple(self._containers.values())

    def __iter__(self) -> Iterator[ListenerContainer]:
        return iter(self.containers)

    def container(self, listener_id: str) -> ListenerContainer:
        """The container of a listener, to pause it or to start one that does not start by itself.

        Raises:
            ListenerError: There is none of this id.
        """
        try:
            return self._containers[listener_id]
        except KeyError:
            known = ", ".join(self._containers) or "none"
            raise ListenerError(f"there is no listener {listener_id!r}; registered are: {known}") from None

    @property
    def is_ready(self) -> bool:
        """Whether every listener that starts by itself is running."""
        return all(container.is_running for container in self if container.endpoint.settings.auto_startup)

    def register(self, target: object) -> list[ListenerContainer]:
        """Take in a decorated function, or an object of a decorated class; returns a container for each decorator.

        Raises:
            ListenerError: It is no listener, is declared wrongly, or its id is taken.
            UnsupportedError: It asks for what cannot be honoured.
        """
        made = []
        for endpoint in make_endpoints(target, self._resolve):
            if endpoint.id in self._containers:
                raise ListenerError(
                    f"two listeners have the id {endpoint.id!r}; give one another id=, or register the object once"
                )
            if (switched := self._switch(endpoint)) is not None:
                container = ListenerContainer(self._broker, switched, self._converter, loop=self._loop)
                self._containers[endpoint.id] = container
                made.append(container)
        return made

    def _switch(self, endpoint: Endpoint) -> Endpoint | None:
        settings = endpoint.settings
        topics = tuple(topic for topic in settings.topics if self._is_enabled(settings.group, topic))
        if not settings.enabled or not topics:
            _log.info("listener.disabled", listener=endpoint.id, group=settings.group, topics=list(settings.topics))
            return None
        return endpoint if topics == settings.topics else replace(endpoint, settings=replace(settings, topics=topics))

    def start(self) -> None:
        """Check the listeners against each other and start those that start by themselves.

        Raises:
            ListenerError: Their subscriptions contradict each other; nothing was started.
            Exception: One could not start; those before it were stopped again.
        """
        check_subscriptions(container.endpoint.settings for container in self)
        with contextlib.ExitStack() as undo:
            for container in self:
                if container.endpoint.settings.auto_startup and not container.is_running:
                    container.start()
                    undo.callback(container.stop)
            undo.pop_all()

    def stop(self) -> None:
        """Stop all, the last one first.

        Raises:
            ExceptionGroup: Some could not be stopped cleanly; all were tried.
        """
        errors: list[Exception] = []
        for stop in [*(container.stop for container in reversed(self.containers)), self._loop.stop]:
            try:
                stop()
            except Exception as error:
                errors.append(error)
        if errors:
            raise ExceptionGroup("listeners could not be stopped cleanly", errors)


def check_subscriptions(listeners: Iterable[ListenerSettings]) -> None:
    """Refuse listeners of one group that want different things.

    Each member of a group gets a part of the queues of all topics that the group subscribes to. A member with
    another subscription silently loses what the others' queues hold, so such a group is an error from the start.

    Raises:
        ListenerError: Names both listeners, the difference, and the way out.
    """
    first_of: dict[str, ListenerSettings] = {}
    for listener in listeners:
        first = first_of.setdefault(listener.group, listener)
        for what, one, other in (
            ("subscribe to different things", _subscription(first), _subscription(listener)),
            ("have different message models", first.message_model.value, listener.message_model.value),
            ("have different consume modes", first.consume_mode.value, listener.consume_mode.value),
        ):
            if one != other:
                raise ListenerError(
                    f"listeners {first.id} and {listener.id} are both of group {listener.group!r} and {what}: "
                    f"{one} and {other}. The members of a group share its queues, so each would lose messages meant "
                    "for the other. Give each listener a consumer_group of its own, or hear all of it in one listener"
                )


def _subscription(listener: ListenerSettings) -> str:
    kind = "" if isinstance(listener.selector, TagSelector) else f" ({SelectorType.SQL92.value})"
    return ", ".join(f"{topic}:{listener.selector.expression}{kind}" for topic in sorted(listener.topics))
