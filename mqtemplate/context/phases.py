"""The phases of an application's life: configure, link, open, close.

`configure_and_link` registers the components, runs the starters and resolves all dependencies; nothing is open yet.
Then each `Phase` opens its part and adds to the life cycle, beside that line, the stop that undoes it. Closing is
``context.lifecycle.stop``: the stops in reverse order.
"""

from __future__ import annotations

import contextlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from mqtemplate.broker import Broker
from mqtemplate.clock import Clock
from mqtemplate.context.autoconfigure import StarterSource, apply_starters, find_starters
from mqtemplate.context.components import is_handler, is_injectable, is_listener, is_spark_listener
from mqtemplate.context.injection.application_context import ApplicationContext
from mqtemplate.context.injection.lifecycle import HookCaller, closing_of, hook_of
from mqtemplate.context.injection.marks import name_of, pointing_to
from mqtemplate.context.injection.wiring import Definition
from mqtemplate.context.templates import Clusters, ext_template_mark, register_templates, start_broker
from mqtemplate.errors import ConfigurationError, DependencyError, ListenerError, UnsupportedError, reworded
from mqtemplate.event_log import get_logger
from mqtemplate.extras import install_command
from mqtemplate.listener.declaration.hooks import Enhancer, enhancer_order
from mqtemplate.listener.discovery import declared_topics
from mqtemplate.listener.registry import ListenerRegistry
from mqtemplate.scheduling.discovery import is_scheduled
from mqtemplate.scheduling.listeners import ScheduleRunner, ScheduleWatch, register_schedules
from mqtemplate.scheduling.schedules import Schedules
from mqtemplate.template.rocketmq_template import RocketMQTemplate
from mqtemplate.template.transactions import DEFAULT_TEMPLATE_BEAN_NAME, transaction_listener_spec

_log = get_logger("mqtemplate.context")


def configure_and_link(
    context: ApplicationContext, clock: Clock | None = None, starters: Iterable[StarterSource] | None = None
) -> None:
    """Register the components, run the starters, and resolve all dependencies. Nothing is opened yet.

    Args:
        clock: The clock of all components, if it is given.
        starters: Starters, instead of those that are installed.

    Raises:
        ConfigurationError: A starter or a further template is invalid.
        DependencyError: A dependency is missing, or a Spark listener would never run.
        UnsupportedError: A key is set that the broker of a template does not support.
    """
    _register_components(context, clock)
    apply_starters(find_starters(starters), context)
    _log_sources(context)
    _check_spark_listeners(context)
    register_templates(context)
    context.link()


async def open_all(context: ApplicationContext, caller: HookCaller) -> None:
    """Open the brokers and templates, the services, the listeners, and the parts of starters, in this order.

    Args:
        caller: Calls the hooks of services. It suspends only if it awaits them.

    Raises:
        MQTemplateError: Something cannot start. The caller then stops what is open: ``context.lifecycle``.
    """
    for phase in _PHASES:
        await phase(context).open(caller)


def check_all(context: ApplicationContext) -> None:
    """Build all objects and check all listeners and schedules. Nothing is started, no file and no connection opened.

    Raises:
        MQTemplateError: Something is invalid.
    """
    for phase in _PHASES:
        phase(context).check()


def _register_components(context: ApplicationContext, clock: Clock | None) -> None:
    """Register the clock, if there is one, and the components that can be injected."""
    if clock is not None:
        context.register(clock, name="clock")
    for component in context.components:
        if is_injectable(component) and ext_template_mark(component) is None:
            context.register(component)
    for component in context.configured_middlewares:
        if context.definition_of(component) is None:
            context.register(component)


def _check_spark_listeners(context: ApplicationContext) -> None:
    """Raise an error if a Spark listener would never run, or would miss the old broker of a hand-over.

    Log a warning if the configuration switched it off.
    """
    marked = [component for component in context.components if is_spark_listener(component)]
    outcome = next((outcome for outcome in context.conditions if outcome.starter == "spark"), None)
    settings = context.settings.mqtemplate
    if marked and settings.spark.enabled and settings.hand_over.from_ is not None:
        raise UnsupportedError(
            f"{name_of(marked[0])} is a Spark listener, which reads one broker, and mqtemplate.hand-over.from is set: "
            "what the old broker has would not be read. Let the listener finish at the old broker first, in an "
            "application without this setting, and give this one mqtemplate.spark.enabled: false until then"
        )
    if not marked or (outcome is not None and outcome.applied):
        return
    if outcome is not None and outcome.is_installed:
        _log.warning("spark.not_run", listeners=[name_of(each) for each in marked], reason=outcome.reason)
        return
    reason = outcome.reason if outcome is not None else "the starter 'spark' is missing"
    raise DependencyError(
        f"{name_of(marked[0])} is a Spark listener, and nothing would run it ({reason}); "
        f"{install_command('spark')}, or set mqtemplate.spark.enabled: false"
    )


def _log_sources(context: ApplicationContext) -> None:
    """Log the files that were read and the outcome of each starter. A starter may have configured logging by now."""
    origins = context.settings.origins
    _log.debug("config.loaded", files=list(origins.files), profiles=list(origins.profiles))
    for profile in origins.unmatched_profiles:
        _log.warning("config.profile_unmatched", profile=profile, hint="no file and no document is for it")
    for variable, meant in origins.unused_variables.items():
        hint = f"did you mean {meant}?" if meant else "it is not a key; see docs/configuration.md"
        _log.warning("config.variable_unused", variable=variable, hint=hint)
    for outcome in context.conditions:
        event = "starter.applied" if outcome.applied else "starter.skipped"
        _log.debug(event, starter=outcome.starter, reason=outcome.reason)


class Phase(ABC):
    """One phase of the start. What it opens, the life cycle stops in reverse order.

    Args:
        context: The linked objects of the application.
    """

    def __init__(self, context: ApplicationContext) -> None:
        self._context = context

    @abstractmethod
    async def open(self, caller: HookCaller) -> None:
        """Open everything, and add the stops."""

    @abstractmethod
    def check(self) -> None:
        """Build everything and open nothing."""


class BrokerPhase(Phase):
    """The application's broker and template, then the brokers and objects of further templates."""

    async def open(self, caller: HookCaller) -> None:
        self._start_broker()
        self._start_templates()
        self._expect_topics()

    def check(self) -> None:
        self._context.get(Clusters).start_nothing()

    def _start_broker(self) -> None:
        definition = self._context.definition_for(Broker)
        broker = self._context.build(definition)
        if definition.is_owned:
            self._context.lifecycle.push("broker", broker.close)
        broker.start()
        definition = self._context.definition_for(RocketMQTemplate)
        if definition.is_default:
            self._context.lifecycle.push("template", self._context.build(definition).close)

    def _start_templates(self) -> None:
        """Start the brokers of the templates, and build the templates.

        Raises:
            RemoteConnectError: A cluster cannot be reached; a note names the template.
        """
        for name, definition in self._context.get(Clusters).definitions():
            broker = self._context.build(definition)
            self._context.lifecycle.push(f"broker of rocketmq.templates.{name}", broker.close)
            start_broker(broker, f"rocketmq.templates.{name}")
        for definition in self._context.qualified(RocketMQTemplate):
            template = self._context.build(definition)
            self._context.lifecycle.push(f"template {definition.qualifier}", template.close)

    def _expect_topics(self) -> None:
        """Report the topics of all listeners to the brokers. Services may send to them before the listeners start.

        A service may send to any of the brokers, whichever the listener reads from.
        """
        own: Broker = self._context.get(Broker)  # type: ignore[type-abstract]  # selected by its base class
        for component in self._context.components:
            with contextlib.suppress(ListenerError, ConfigurationError):  # reported when the listener is registered
                topics = declared_topics(component, self._context.settings.resolve_text)
                for broker in (own, *(each.broker for each in self._context.get(Clusters).brokers())):
                    broker.expect_topics(topics)
        if scheduled_components(self._context):
            own.expect_topics({self._context.settings.mqtemplate.schedules.topic})


class ObjectPhase(Phase):
    """The objects of the application, each after all that it uses, and their hooks."""

    async def open(self, caller: HookCaller) -> None:
        # The loop of the handlers stops after the last hook.
        self._context.lifecycle.push("event loop", self._context.get(ListenerRegistry).loop.stop)
        for definition in self._context.in_order():
            await self._start_object(definition, caller)
        self._add_transaction_listeners()

    def check(self) -> None:
        for definition in self._context.in_order():
            self._context.build(definition)
        self._add_transaction_listeners()

    async def _start_object(self, definition: Definition, caller: HookCaller) -> None:
        """Build one object and call its ``on_start``. ``close`` undoes the first, ``on_stop`` the second."""
        instance = self._context.build(definition)
        if not definition.is_owned or definition.qualifier or definition is self._context.definition_for(Broker):
            return
        name = definition.title
        if (close := closing_of(instance)) is not None:
            caller.check(f"{name}.{getattr(close, '__name__', 'close')}", close)
            self._context.lifecycle.push(name, close, is_hook=True)
        if isinstance(instance, Broker):  # a second broker, beside the application's own
            instance.start()
        on_start, on_stop = hook_of(instance, "on_start"), hook_of(instance, "on_stop")
        for title, hook in (("on_start", on_start), ("on_stop", on_stop)):
            if hook is not None:
                caller.check(f"{name}.{title}", hook)
        if on_start is not None:
            await caller.call(on_start)
        if on_stop is not None:
            self._context.lifecycle.push(f"{name}.on_stop", on_stop, is_hook=True)

    def _add_transaction_listeners(self) -> None:
        """Add each transaction listener to the template that its decorator names."""
        for component in self._context.components:
            kind = component if inspect.isclass(component) else type(component)
            spec = transaction_listener_spec(kind)
            definition = None if spec is None else self._context.definition_of(component)
            if spec is None or definition is None:
                continue
            try:
                template = self._template_named(spec.rocketmq_template_bean_name)
                template.add_transaction_listener(self._context.build(definition))
            except (ConfigurationError, DependencyError) as exc:
                raise reworded(exc, f"@transaction_listener on {name_of(component)}: {exc}") from exc

    def _template_named(self, bean_name: str) -> RocketMQTemplate:
        """Return the template with a name in Java's form or in ours. The default name also selects the only one."""
        templates = [each for each in self._context.in_order() if issubclass(each.kind, RocketMQTemplate)]
        named = next((each for each in templates if each.is_called(bean_name)), None)
        if named is None and bean_name == DEFAULT_TEMPLATE_BEAN_NAME:
            return self._context.get(RocketMQTemplate)
        if named is None:
            names = sorted(each.qualifier or each.name for each in templates)
            known = ", ".join(names) or "only the application's own, rocketmqTemplate"
            raise DependencyError(f"there is no template {bean_name!r} (there is: {known}); name one of these")
        template: RocketMQTemplate = self._context.build(named)
        return template


class ListenerPhase(Phase):
    """The listeners, including the listeners of schedules."""

    async def open(self, caller: HookCaller) -> None:
        registry = self._register_listeners()
        runners = self._register_schedules(registry)
        # After the brokers that listeners name by address: the registration opens those.
        self._context.lifecycle.push("listeners", registry.stop_listeners)
        registry.start()
        if runners:
            watch = ScheduleWatch(runners, self._context.get(Schedules).topic.broker.clock)
            self._context.lifecycle.push("schedules", watch.stop)
            watch.start()

    def check(self) -> None:
        registry = self._register_listeners()
        for component in scheduled_components(self._context):
            with pointing_to(component):
                self._register_schedule(component, registry)
        registry.check()

    def _register_listeners(self) -> ListenerRegistry:
        registry = self._context.get(ListenerRegistry)
        registry.scopes += self._context.handler_scopes
        registry.enhancers += self._enhancers()
        for component in self._context.components:
            target = self._handler_object(component)
            if target is None or not is_listener(target):
                continue
            with pointing_to(component):
                try:
                    registry.register(target)
                except ConfigurationError as exc:
                    raise ConfigurationError(f"@message_listener on {name_of(component)}: {exc}") from exc
        return registry

    def _enhancers(self) -> Iterator[Enhancer]:
        """Yield the enhancers of listeners in their order: functions, and built objects of classes."""
        marked = [(order, each) for each in self._context.components if (order := enhancer_order(each)) is not None]
        for _, component in sorted(marked, key=lambda each: each[0]):
            definition = self._context.definition_of(component)
            enhancer: Any = component if definition is None else self._context.build(definition)
            yield enhancer

    def _register_schedules(self, registry: ListenerRegistry) -> list[ScheduleRunner]:
        """Register a listener for each schedule. Return the schedules to start after the listeners."""
        components = scheduled_components(self._context)
        if components and not self._context.settings.mqtemplate.schedules.enabled:
            _log.info("schedules.disabled", key="mqtemplate.schedules.enabled")
            return []
        runners: list[ScheduleRunner] = []
        for component in components:
            self._context.get(Schedules).topic.check_supported()
            with pointing_to(component):
                runners += self._register_schedule(component, registry)
        return runners

    def _register_schedule(self, component: object, registry: ListenerRegistry) -> list[ScheduleRunner]:
        schedules, resolve = self._context.get(Schedules), self._context.settings.resolve_text
        return register_schedules(self._handler_object(component), schedules, registry, resolve)

    def _handler_object(self, component: object) -> object | None:
        """Return the object whose methods are called: built for a class, the function itself for a function."""
        if is_handler(component):
            return component
        definition = self._context.definition_of(component)
        return None if definition is None else self._context.build(definition)


class PartPhase(Phase):
    """The parts of starters, which run beside the listeners."""

    async def open(self, caller: HookCaller) -> None:
        for part in self._context.parts:
            self._context.lifecycle.push(part.name, part.stop)
            part.start()

    def check(self) -> None:
        """Nothing to do: a part was built by its starter."""


_PHASES: tuple[type[Phase], ...] = (BrokerPhase, ObjectPhase, ListenerPhase, PartPhase)


def scheduled_components(context: ApplicationContext) -> list[object]:
    """Return the functions with schedules, and the components with scheduled methods that nothing replaces."""
    found = []
    for component in context.components:
        definition = context.definition_of(component)
        is_own = is_handler(component)
        if is_scheduled(component if is_own or definition is None else definition.kind) and (
            definition is not None or is_own
        ):
            found.append(component)
    return found


def log_ready(context: ApplicationContext, took_ms: int) -> None:
    """Log the one line of a normal start: the broker and its files, the configuration, and what runs."""
    settings, broker = context.settings, context.get(Broker)  # type: ignore[type-abstract]  # selected by its base class
    fields: dict[str, object] = {"broker": broker.name}
    if broker.is_embedded:
        fields["files"] = "memory" if broker.path is None else str(broker.path)
    else:
        fields["name_server"] = settings.rocketmq.name_server
    if templates := [each.qualifier for each in context.qualified(RocketMQTemplate)]:
        fields["templates"] = ",".join(map(str, templates))
    _log.info(
        "application.ready",
        **fields,
        listeners=len(context.get(ListenerRegistry).containers),
        starters=",".join(outcome.starter for outcome in context.conditions if outcome.has_acted) or "none",
        profiles=",".join(settings.origins.profiles) or "none",
        config=",".join(settings.origins.files) or f"no application.yml in {settings.origins.folder}",
        took_ms=took_ms,
    )
