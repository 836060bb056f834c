"""Registry of all listeners of an application: they are checked together, started in order, stopped in reverse."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from mqtemplate.broker import Broker
from mqtemplate.calls.handling import Observation
from mqtemplate.calls.message_trace import TraceDispatcher, TraceOf
from mqtemplate.clock import Clock
from mqtemplate.converter import MessageConverter, TypeChecks
from mqtemplate.errors import ConversionError, ListenerError, UnsupportedError
from mqtemplate.event_log import get_logger
from mqtemplate.listener.container.container import ListenerContainer, choose_loop
from mqtemplate.listener.declaration.attributes import Resolve
from mqtemplate.listener.declaration.hooks import Enhancer
from mqtemplate.listener.declaration.resolution import default_resolve
from mqtemplate.listener.declaration.settings import ClusterChoice, ListenerSettings, RetryDefaults
from mqtemplate.listener.discovery import make_endpoints
from mqtemplate.listener.handler.payload import ConverterOf, converter_of
from mqtemplate.listener.handler.plan import Endpoint
from mqtemplate.listener.handler.providers import HandlerScope, ObjectSource, scope_middlewares
from mqtemplate.listener.handler.results import SendingTemplate
from mqtemplate.selectors.tags import SelectorType, TagSelector
from mqtemplate.services import Service, ServiceRunner, wall_time

BrokerOf = Callable[[str, ClusterChoice], Broker]
"""Function that returns the broker of a cluster: (listener, choice) -> broker."""


def no_other_cluster(listener: str, choice: ClusterChoice) -> Broker:
    """Refuse any other cluster than the one of the registry, where no application connects to others.

    Raises:
        UnsupportedError: Always.
    """
    named = f"broker is {choice.broker!r}" if choice.broker else f"name_server is {choice.name_server!r}"
    raise UnsupportedError(
        f"listener {listener}: {named}, and this registry has one broker only; let an MQApplication start the "
        "listener, or create a registry over the broker of that cluster"
    )


IsEnabled = Callable[[str, str], bool]
"""Function that returns True if the configuration lets a listener run: (group, topic) -> bool."""

_log = get_logger("mqtemplate.listener")
_NO_DEFAULTS = RetryDefaults()


class ListenerRegistry:
    """Containers of the listeners.

    Args:
        resolve: Function that replaces the placeholders of the decorators.
        is_enabled: Switch for single listeners, as ``rocketmq.consumer.listeners.<group>.<topic>: false``. A listener
            of several topics loses the disabled one.
        retry_defaults: Retry policy of listeners whose decorator does not say otherwise.
        broker_of: Finds the broker of a listener that names another cluster.
        converter_of_class: Returns the converter for a class that a listener names.
        trace_of: Returns the sender of trace records: (broker, trace topic, is_cloud=...).
        enabled: False: this process runs no listeners.
        only: Names of the listeners that run in this process: ids, or the last parts of ids. Empty for all.
        middlewares: Middlewares of all listeners, the outermost first; the ones of *objects* are inside of them.
        objects: Source of the objects that handlers take by type, and of middlewares.
        template: Function that returns the template for results of handlers.
        observation: Measures or traces the calls of all handlers; None: nothing does.

    Attributes:
        scopes: Contexts around each call of a handler and its middlewares; to be added before the listeners are
            registered.
        enhancers: Functions that may change the attributes of the listeners that are registered from now on.
        objects: Source of the objects that handlers take by type; None without an application.
        loop: Event loop of the ``async def`` handlers: the one that runs in the thread that creates the registry.
    """

    def __init__(
        self,
        broker: Broker,
        converter: MessageConverter,
        *,
        resolve: Resolve = default_resolve,
        is_enabled: IsEnabled = lambda _group, _topic: True,
        retry_defaults: RetryDefaults = _NO_DEFAULTS,
        broker_of: BrokerOf = no_other_cluster,
        converter_of_class: ConverterOf = lambda kind: kind(),
        trace_of: TraceOf = TraceDispatcher,
        enabled: bool = True,
        only: Sequence[str] = (),
        middlewares: Iterable[object] = (),
        objects: ObjectSource | None = None,
        template: Callable[[], SendingTemplate] | None = None,
        observation: Observation | None = None,
    ) -> None:
        self._broker = broker
        self._converter = converter
        self._resolve = resolve
        self._is_enabled = is_enabled
        self._retry_defaults = retry_defaults
        self._broker_of = broker_of
        self._converter_of_class = converter_of_class
        self._trace_of = trace_of
        self.enhancers: list[Enhancer] = []
        self._enabled = enabled
        self._only = tuple(only)
        self._known: list[str] = []
        self.scopes: list[HandlerScope] = []
        self._middlewares = tuple(middlewares)
        self.objects = objects
        self._template = template
        self._observation = observation
        self.loop = choose_loop(broker.clock)
        self._containers: dict[str, ListenerContainer] = {}
        self._watch = TopicWatch(broker.clock)

    @property
    def containers(self) -> Sequence[ListenerContainer]:
        """Containers in the order of registration, without disabled listeners."""
        return tuple(self._containers.values())

    def __iter__(self) -> Iterator[ListenerContainer]:
        return iter(self.containers)

    def container(self, listener_id: str) -> ListenerContainer:
        """Return the container of a listener, for example to pause it or to start it by hand.

        Raises:
            ListenerError: No listener has this id.
        """
        try:
            return self._containers[listener_id]
        except KeyError:
            known = ", ".join(self._containers) or "none"
            raise ListenerError(f"there is no listener {listener_id!r}; registered are: {known}") from None

    @property
    def is_ready(self) -> bool:
        """True if every listener with ``auto_startup`` is running."""
        return all(container.is_running for container in self if container.endpoint.settings.auto_startup)

    @property
    def middlewares(self) -> Sequence[object]:
        """Middlewares of all listeners, the outermost first."""
        return (*self._middlewares, *(() if self.objects is None else self.objects.middlewares()))

    def register(self, target: object, *, is_internal: bool = False) -> list[ListenerContainer]:
        """Add a decorated function, or an object of a decorated class. Return a container for each decorator.

        Args:
            is_internal: True for a listener of the library itself: the enhancers and middlewares of the application do
                not act on it.

        Raises:
            ListenerError: The object is not a listener, is declared wrongly, or its id is taken.
            UnsupportedError: The broker cannot honour an attribute.
        """
        added = []
        enhancers = () if is_internal else self.enhancers
        for endpoint in make_endpoints(target, self._resolve, enhancers, self.objects, self._template):
            if endpoint.id in self._containers:
                raise ListenerError(
                    f"two listeners have the id {endpoint.id!r}; give one another id=, or register the object once"
                )
            self._known.append(endpoint.id)
            if (enabled := self._enabled_part(endpoint)) is not None:
                container = self._container_of(enabled, () if is_internal else self.middlewares)
                self._containers[endpoint.id] = container
                added.append(container)
        return added

    def _container_of(self, endpoint: Endpoint, shared: Sequence[object]) -> ListenerContainer:
        """Return a container for an endpoint, with middlewares around its own."""
        broker = self._broker_for(endpoint)
        converter = converter_of(endpoint.id, endpoint.settings.payloads, self._converter, self._converter_of_class)
        _check_types(endpoint, converter)
        trace = self._trace_for(broker, endpoint.settings)
        scopes = scope_middlewares(self.scopes, is_async=endpoint.plan.is_async)
        with_shared = replace(endpoint, middlewares=(*scopes, *shared, *endpoint.middlewares))
        return ListenerContainer(
            broker, with_shared, converter, loop=self.loop, trace=trace, observation=self._observation
        )

    def _broker_for(self, endpoint: Endpoint) -> Broker:
        cluster = endpoint.settings.cluster
        return self._broker if cluster is None else self._broker_of(endpoint.id, cluster)

    def _trace_for(self, broker: Broker, settings: ListenerSettings) -> TraceDispatcher | None:
        if not settings.enable_msg_trace:
            return None
        is_cloud = settings.access_channel.upper() == "CLOUD"
        return self._trace_of(broker, settings.customized_trace_topic, is_cloud=is_cloud)

    def _enabled_part(self, endpoint: Endpoint) -> Endpoint | None:
        settings = endpoint.settings
        topics = tuple(topic for topic in settings.topics if self._is_enabled(settings.group, topic))
        if not settings.enabled or not (topics or settings.topic_patterns) or not self._runs_here(endpoint.id):
            _log.info("listener.disabled", listener=endpoint.id, group=settings.group, topics=list(settings.topics))
            return None
        return replace(
            endpoint,
            settings=replace(settings, topics=topics).with_defaults(self._retry_defaults),
        )

    def _runs_here(self, listener_id: str) -> bool:
        """Return True if the configuration selects a listener for this process."""
        return self._enabled and (not self._only or any(is_called(listener_id, name) for name in self._only))

    def check(self) -> None:
        """Check the listeners against each other.

        Raises:
            ListenerError: Subscriptions contradict each other, or no listener has a name that was selected.
        """
        for name in self._only:
            if not any(is_called(each, name) for each in self._known):
                known = ", ".join(self._known) or "none"
                raise ListenerError(
                    f"mqtemplate.listener.only selects {name!r}, and no listener is called that (there is: {known}); "
                    "give an id, or the last part of one"
                )
        for broker in {id(container.broker): container.broker for container in self}.values():
            check_subscriptions(each.endpoint.settings for each in self if each.broker is broker)

    def start(self) -> None:
        """Check the listeners against each other and start those with ``auto_startup``.

        Raises:
            ListenerError: Subscriptions contradict each other, or a selected listener is missing; none was started.
            Exception: A listener could not start; those started before it were stopped again.
        """
        self.check()
        with contextlib.ExitStack() as undo:
            undo.callback(self._watch.stop)
            for container in self:
                if container.endpoint.settings.auto_startup and not container.is_running:
                    container.start()
                    undo.callback(container.stop)
            self._watch.start(self)
            undo.pop_all()

    def stop(self) -> None:
        """Stop all listeners, the last one first, and their event loop.

        All stop fetching at once, so they wait for their handlers at the same time: the longest time for the wait that
        a listener has is the time for all of them.

        Raises:
            ExceptionGroup: Some could not be stopped cleanly; all others were stopped.
        """
        _stop_each([self.stop_listeners, self.loop.stop])

    def stop_listeners(self) -> None:
        """Stop all listeners, the last one first. The event loop goes on, for what else runs there.

        Raises:
            ExceptionGroup: Some could not be stopped cleanly; all others were stopped.
        """
        self._watch.stop()
        containers = list(reversed(self.containers))
        for container in containers:
            container.stop_fetching()
        _stop_each([*(container.stop for container in containers), self.loop.cancel])


def _check_types(endpoint: Endpoint, converter: MessageConverter) -> None:
    """Refuse a handler whose parameter has a type that no body can become.

    Raises:
        ListenerError: It names the listener and the types that are allowed.
    """
    types = TypeChecks(converter)
    for plan in endpoint.plan.plans():
        if plan.is_raw:
            continue
        try:
            types.check(plan.payload_type)
        except ConversionError as exc:
            raise ListenerError(f"{endpoint.id}: {exc}") from exc


def is_called(listener_id: str, name: str) -> bool:
    """Return True if a name is an id, or its last parts: ``bill`` and ``orders.bill`` for ``shop.orders.bill``."""
    return listener_id == name or listener_id.endswith(f".{name}")


def _stop_each(stops: Iterable[Callable[[], None]]) -> None:
    errors: list[Exception] = []
    for stop in stops:
        try:
            stop()
        except ExceptionGroup as group:
            errors.extend(group.exceptions)
        except Exception as error:
            errors.append(error)
    if errors:
        raise ExceptionGroup("listeners could not be stopped cleanly", errors)


def check_subscriptions(listeners: Iterable[ListenerSettings]) -> None:
    """Refuse listeners of one group with different subscriptions, message models, consume or request modes.

    Each member of a group gets a part of the queues of all topics that the group subscribes to. A member with another
    subscription would silently lose the messages in the queues of the other members.

    Raises:
        ListenerError: It names both listeners, the difference, and the solution.
    """
    first_of: dict[str, ListenerSettings] = {}
    for listener in listeners:
        first = first_of.setdefault(listener.group, listener)
        for what, one, other in (
            ("have different subscriptions", _subscription(first), _subscription(listener)),
            ("have different message models", first.message_model.value, listener.message_model.value),
            ("have different consume modes", first.consume_mode.value, listener.consume_mode.value),
            ("have different request modes", first.request_mode.value, listener.request_mode.value),
        ):
            if one != other:
                raise ListenerError(
                    f"listeners {first.id} and {listener.id} are both of group {listener.group!r} and {what}: "
                    f"{one} and {other}. The members of a group share its queues, so each would lose messages of the "
                    "other; give each listener a consumer_group of its own, or use one listener for all"
                )


def _subscription(listener: ListenerSettings) -> str:
    topics = listener.topic_patterns or listener.topics  # the topics of a pattern are found when the listener starts
    kind = "" if isinstance(listener.selector, TagSelector) else f" ({SelectorType.SQL92.value})"
    return ", ".join(f"{topic}:{listener.selector.expression}{kind}" for topic in sorted(topics))


_INTERVAL_MS = 30_000
"""Time between two searches for new topics. Source: ``client: ClientConfig.pollNameServerInterval``."""


class TopicWatch:
    """Search for new topics, for the listeners with patterns. A `Service`; on a system clock it has a thread.

    A listener with a new topic leaves its group and joins it again with all of them; its handlers finish before.

    Attributes:
        stop: Ends the search.
    """

    name = "listener topics"

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._containers: list[ListenerContainer] = []
        self._due_ms = clock.steady_ms() + _INTERVAL_MS
        self._runner = ServiceRunner(self, clock, "mqtemplate-topics", _report)
        self.stop = self._runner.stop

    def start(self, containers: Iterable[ListenerContainer]) -> None:
        """Watch for the containers that have patterns; do nothing without one."""
        self._containers = [each for each in containers if each.endpoint.settings.topic_patterns]
        if not self._containers:
            return
        self._due_ms = self._clock.steady_ms() + _INTERVAL_MS
        self._runner.start()

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Nothing wakes this service before its time."""

    def step(self) -> int | None:
        """Let the listeners join the topics that are new, if it is time. Return the time of the next search."""
        if self._clock.steady_ms() < self._due_ms:
            return wall_time(self._clock, self._due_ms)
        self._due_ms = self._clock.steady_ms() + _INTERVAL_MS
        for container in self._containers:
            if container.is_running:
                container.follow_topics()
        return wall_time(self._clock, self._due_ms)


def _report(service: Service, error: Exception, repeated: int) -> None:
    _log.warning("listener.topics_unknown", reason=str(error), repeated=repeated)
