"""The steps of an application's start. Each step adds the stop that undoes it to the context's life cycle."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from dependency_injector import providers

from mqtemplate.broker import Broker
from mqtemplate.calls.handling import Observation
from mqtemplate.calls.message_trace import Traces
from mqtemplate.clock import Clock
from mqtemplate.context.failure_report import pointing_to
from mqtemplate.context.hooks import HookCaller
from mqtemplate.context.injection.application_context import BUILT_IN, ApplicationContext
from mqtemplate.context.injection.components import is_handler, is_injectable, is_listener, is_spark_listener
from mqtemplate.context.injection.definitions import Definition
from mqtemplate.context.injection.marks import name_of
from mqtemplate.context.injection.new_template import new_template
from mqtemplate.context.lifecycle import closing_of, hook_of
from mqtemplate.context.templates.clusters import Clusters, start_broker
from mqtemplate.context.templates.decorator import ext_template_mark
from mqtemplate.context.templates.template_specs import TemplateSpec, template_specs
from mqtemplate.converter import MessageConverter
from mqtemplate.errors import ConfigurationError, DependencyError, ListenerError
from mqtemplate.event_log import get_logger
from mqtemplate.listener.declaration.hooks import Enhancer, enhancer_order
from mqtemplate.listener.discovery import declared_topics
from mqtemplate.listener.registry import ListenerRegistry
from mqtemplate.scheduling.discovery import is_scheduled
from mqtemplate.scheduling.listeners import ScheduleRunner, ScheduleWatch, register_schedules
from mqtemplate.scheduling.schedules import Schedules
from mqtemplate.template.rocketmq_template import RocketMQTemplate
from mqtemplate.template.transactions import DEFAULT_TEMPLATE_BEAN_NAME, transaction_listener_spec
from mqtemplate.user_code import reworded

_log = get_logger("mqtemplate.context")


def register_components(context: ApplicationContext, clock: Clock | None) -> None:
    """Register the clock, if there is one, and the components that can be injected."""
    if clock is not None:
        context.register(clock, name="clock")
    for component in context.components:
        if is_injectable(component) and ext_template_mark(component) is None:
            context.register(component)
    for component in context.configured_middlewares:
        if context.definition_of(component) is None:
            context.register(component)


def link(context: ApplicationContext) -> None:
    """Log what was read and what the starters did, and resolve all dependencies. Nothing is opened yet.

    Raises:
        DependencyError: A dependency is missing, or a Spark listener would never run.
    """
    _log_sources(context)
    _check_spark_listeners(context)
    _register_templates(context)
    context.link()


async def open_all(context: ApplicationContext, caller: HookCaller) -> None:
    """Start the broker, the template, the services, the listeners, and the parts of starters.

    Args:
        caller: Calls the hooks of services. It suspends only if it awaits them.

    Raises:
        MQTemplateError: Something cannot start. The caller then stops what is open: ``context.lifecycle``.
    """
    _start_broker(context)
    _start_templates(context)
    _expect_topics(context)
    context.lifecycle.push("event loop", context.get(ListenerRegistry).loop.stop)
    for definition in context.in_order():
        await _start_object(definition, context, caller)
    _add_transaction_listeners(context)
    _start_listeners(context)
    for part in context.parts:
        context.lifecycle.push(part.name, part.stop)
        part.start()


def log_ready(context: ApplicationContext, took_ms: int) -> None:
    """Log the one line of a normal start: the broker and its files, the configuration, and what runs."""
    settings, broker = context.settings, context.get(Broker)  # type: ignore[type-abstract]  # selected by its base class
    fields: dict[str, object] = {"broker": broker.name}
    if hasattr(broker, "path"):  # an embedded one; its class is not imported for an application without it
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


def _start_broker(context: ApplicationContext) -> None:
    definition = context.definition_for(Broker)
    broker = context.build(definition)
    if definition.is_owned:
        context.lifecycle.push("broker", broker.close)
    broker.start()
    definition = context.definition_for(RocketMQTemplate)
    if definition.is_default:
        context.lifecycle.push("template", context.build(definition).close)


def _register_templates(context: ApplicationContext) -> None:
    """Register the further templates and their brokers, after the starters. Nothing is opened yet.

    Raises:
        ConfigurationError: A name is not allowed or used twice, or a class lacks its section.
        UnsupportedError: A key is set that the broker of a template does not support.
    """
    clusters = Clusters(context)
    with context.contributions(BUILT_IN):
        context.register(clusters, name="mqtemplate.clusters")
    traces = Traces(context.lifecycle.push)
    context.built_in.trace_of.override(providers.Object(traces.dispatcher))
    for spec in template_specs(context.settings, context.components):
        _register_template(spec, clusters, context)
    context.built_in.broker_of.override(providers.Object(clusters.broker_of))
    context.built_in.converter_of_class.override(providers.Object(lambda kind: _converter_of(kind, context)))


def _converter_of(kind: type, context: ApplicationContext) -> MessageConverter:
    """Return the converter that a listener names by its class: that of the application, else a new one."""
    found: Any = context.get(kind) if context.has(kind) else context.call(kind)
    converter: MessageConverter = found
    return converter


def _register_template(spec: TemplateSpec, clusters: Clusters, context: ApplicationContext) -> None:
    broker = clusters.add_template(spec)
    converter = context.definition_for(MessageConverter)
    observation = context.definition_for(Observation)
    trace_of = context.built_in.trace_of()

    shared = context.sending_middlewares() if spec.middlewares is None else []

    def build(
        broker: Broker, converter: MessageConverter, observation: Observation, *middlewares: object
    ) -> RocketMQTemplate:
        own = [_middleware(each, context) for each in spec.middlewares or ()]
        rocketmq, around = spec.settings.rocketmq, (*middlewares, *own)
        return new_template(spec.kind, broker, converter, rocketmq, trace_of, observation, middlewares=around)

    context.add_qualified(spec.name, spec.kind, build, [broker, converter, observation, *shared])


def _middleware(given: object, context: ApplicationContext) -> object:
    """Return a middleware of one template: an object as it is, that of the application for a class, else a new one."""
    if not isinstance(given, type):
        return given
    definition = context.definition_of(given)
    return context.call(given) if definition is None else context.build(definition)


def _start_templates(context: ApplicationContext) -> None:
    """Start the brokers of the templates, and build the templates.

    Raises:
        RemoteConnectError: A cluster cannot be reached; a note names the template.
    """
    for name, definition in context.get(Clusters).definitions():
        broker = context.build(definition)
        context.lifecycle.push(f"broker of rocketmq.templates.{name}", broker.close)
        start_broker(broker, f"rocketmq.templates.{name}")
    for definition in context.qualified(RocketMQTemplate):
        template = context.build(definition)
        context.lifecycle.push(f"template {definition.qualifier}", template.close)


def _expect_topics(context: ApplicationContext) -> None:
    """Report the topics of all listeners to the brokers. Services may send to them before the listeners start.

    A service may send to any of the brokers, whichever the listener reads from.
    """
    own: Broker = context.get(Broker)  # type: ignore[type-abstract]  # selected by its base class
    for component in context.components:
        with contextlib.suppress(ListenerError, ConfigurationError):  # reported when the listener is registered
            topics = declared_topics(component, context.settings.resolve_text)
            for broker in (own, *(each.broker for each in context.get(Clusters).brokers())):
                broker.expect_topics(topics)
    if _scheduled_components(context):
        own.expect_topics({context.settings.mqtemplate.schedules.topic})


async def _start_object(definition: Definition, context: ApplicationContext, caller: HookCaller) -> None:
    """Build one object and call its ``on_start``. ``close`` undoes the first, ``on_stop`` the second."""
    instance = context.build(definition)
    if not definition.is_owned or definition.qualifier or definition is context.definition_for(Broker):
        return
    name = definition.title
    if (close := closing_of(instance)) is not None:
        caller.check(f"{name}.{getattr(close, '__name__', 'close')}", close)
        context.lifecycle.push(name, close, is_hook=True)
    if isinstance(instance, Broker):  # a second broker, beside the application's own
        instance.start()
    on_start, on_stop = hook_of(instance, "on_start"), hook_of(instance, "on_stop")
    for title, hook in (("on_start", on_start), ("on_stop", on_stop)):
        if hook is not None:
            caller.check(f"{name}.{title}", hook)
    if on_start is not None:
        await caller.call(on_start)
    if on_stop is not None:
        context.lifecycle.push(f"{name}.on_stop", on_stop, is_hook=True)


def _add_transaction_listeners(context: ApplicationContext) -> None:
    """Add each transaction listener to the template that its decorator names."""
    for component in context.components:
        kind = component if inspect.isclass(component) else type(component)
        spec = transaction_listener_spec(kind)
        definition = None if spec is None else context.definition_of(component)
        if spec is None or definition is None:
            continue
        try:
            template = _template_named(spec.rocketmq_template_bean_name, context)
            template.add_transaction_listener(context.build(definition))
        except (ConfigurationError, DependencyError) as exc:
            raise reworded(exc, f"@transaction_listener on {name_of(component)}: {exc}") from exc


def _template_named(bean_name: str, context: ApplicationContext) -> RocketMQTemplate:
    """Return the template with a name in Java's form or in ours. The default name also selects the only template."""
    templates = [each for each in context.in_order() if issubclass(each.kind, RocketMQTemplate)]
    named = next((each for each in templates if each.is_called(bean_name)), None)
    if named is None and bean_name == DEFAULT_TEMPLATE_BEAN_NAME:
        return context.get(RocketMQTemplate)
    if named is None:
        names = sorted(each.qualifier or each.name for each in templates)
        known = ", ".join(names) or "only the application's own, rocketmqTemplate"
        raise DependencyError(f"there is no template {bean_name!r} (there is: {known}); name one of these")
    template: RocketMQTemplate = context.build(named)
    return template


def _start_listeners(context: ApplicationContext) -> None:
    registry = context.get(ListenerRegistry)
    _register_listeners(context, registry)
    runners = _register_schedules(context, registry)
    context.lifecycle.push("listeners", registry.stop_listeners)  # after the brokers that listeners name by address
    registry.start()
    if runners:
        watch = ScheduleWatch(runners, context.get(Schedules))
        context.lifecycle.push("schedules", watch.stop)
        watch.start()


def check_all(context: ApplicationContext) -> None:
    """Build all objects and check all listeners and schedules. Nothing is started, no file and no connection opened.

    Raises:
        MQTemplateError: Something is invalid.
    """
    context.get(Clusters).start_nothing()
    for definition in context.in_order():
        context.build(definition)
    _add_transaction_listeners(context)
    registry = context.get(ListenerRegistry)
    _register_listeners(context, registry)
    for component in _scheduled_components(context):
        with pointing_to(component):
            schedules = context.get(Schedules)
            register_schedules(_handler_object(component, context), schedules, registry, context.settings.resolve_text)
    registry.check()


def _register_listeners(context: ApplicationContext, registry: ListenerRegistry) -> None:
    registry.scopes += context.handler_scopes
    for enhancer in _enhancers(context):
        registry.add_enhancer(enhancer)
    for component in context.components:
        target = _handler_object(component, context)
        if target is None or not is_listener(target):
            continue
        with pointing_to(component):
            try:
                registry.register(target)
            except ConfigurationError as exc:
                raise ConfigurationError(f"@message_listener on {name_of(component)}: {exc}") from exc


def _enhancers(context: ApplicationContext) -> Iterator[Enhancer]:
    """Yield the enhancers of listeners in their order: functions, and built objects of classes."""
    marked = [(order, each) for each in context.components if (order := enhancer_order(each)) is not None]
    for _, component in sorted(marked, key=lambda each: each[0]):
        definition = context.definition_of(component)
        enhancer: Any = component if definition is None else context.build(definition)
        yield enhancer


def _register_schedules(context: ApplicationContext, registry: ListenerRegistry) -> list[ScheduleRunner]:
    """Register a listener for each schedule. Return the schedules to start after the listeners."""
    components, settings = _scheduled_components(context), context.settings
    if components and not settings.mqtemplate.schedules.enabled:
        _log.info("schedules.disabled", key="mqtemplate.schedules.enabled")
        return []
    runners: list[ScheduleRunner] = []
    for component in components:
        schedules = context.get(Schedules)
        schedules.topic.check_supported()
        target = _handler_object(component, context)
        with pointing_to(component):
            runners += register_schedules(target, schedules, registry, settings.resolve_text)
    return runners


def _scheduled_components(context: ApplicationContext) -> list[object]:
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


def _handler_object(component: object, context: ApplicationContext) -> object | None:
    """Return the object whose methods are called: built for a class, the function itself for a function."""
    if is_handler(component):
        return component
    definition = context.definition_of(component)
    return None if definition is None else context.build(definition)


def _check_spark_listeners(context: ApplicationContext) -> None:
    """Raise an error if a Spark listener would never run; log a warning if the configuration switched it off."""
    marked = [component for component in context.components if is_spark_listener(component)]
    outcome = next((outcome for outcome in context.conditions if outcome.starter == "spark"), None)
    if not marked or (outcome is not None and outcome.applied):
        return
    if outcome is not None and outcome.is_installed:
        _log.warning("spark.not_run", listeners=[name_of(each) for each in marked], reason=outcome.reason)
        return
    reason = outcome.reason if outcome is not None else "the starter 'spark' is missing"
    raise DependencyError(
        f"{name_of(marked[0])} is a Spark listener, and nothing would run it ({reason}); "
        "pip install 'mqtemplate[spark]', or set mqtemplate.spark.enabled: false"
    )


def _log_sources(context: ApplicationContext) -> None:
    """Log the files that were read and the outcome of each starter. A starter may have configured logging by now."""
    origins = context.settings.origins
    _log.debug("config.loaded", files=list(origins.files), profiles=list(origins.profiles))
    for profile in origins.unmatched_profiles:
        _log.warning("config.profile_unmatched", profile=profile, hint="no file and no document is for it")
    for variable, meant in origins.unused_variables.items():
        hint = f"did you mean {meant}?" if meant else "it is no key; see docs/configuration.md"
        _log.warning("config.variable_unused", variable=variable, hint=hint)
    for outcome in context.conditions:
        event = "starter.applied" if outcome.applied else "starter.skipped"
        _log.debug(event, starter=outcome.starter, reason=outcome.reason)
