"""Further templates: their decorators, their settings, and the brokers that they and listeners use."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from dependency_injector import providers
from pydantic import ValidationError

from mqtemplate.broker import Broker, MessageModel
from mqtemplate.callables import refuse_bare
from mqtemplate.calls.handling import Observation
from mqtemplate.calls.message_trace import Traces
from mqtemplate.calls.middlewares import check_middleware, read_middlewares
from mqtemplate.calls.middlewares import name_of as middleware_name
from mqtemplate.clock import Clock
from mqtemplate.context.config.binding import message_of
from mqtemplate.context.config.masking import masked, masked_text
from mqtemplate.context.injection.application_context import (
    BUILT_IN,
    ApplicationContext,
    BrokerFactory,
    FurtherBrokers,
    NamedBroker,
)
from mqtemplate.context.injection.built_in import new_template
from mqtemplate.context.injection.marks import name_of, pointing_to, type_hints
from mqtemplate.context.injection.wiring import Definition, snake_case
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.clients import settings_of_template
from mqtemplate.context.settings.rocketmq import EmbeddedStore, TemplateSettings, parse_name_server
from mqtemplate.converter import MessageConverter
from mqtemplate.durations import Duration
from mqtemplate.errors import ConfigurationError, DependencyError, ListenerError
from mqtemplate.listener.declaration.settings import ClusterChoice
from mqtemplate.selectors.tags import SelectorType
from mqtemplate.template.rocketmq_template import RocketMQTemplate

EXT_TEMPLATE_ATTRIBUTE = "__mqtemplate_ext_template__"
"""Attribute of a decorated class that holds its `ExtTemplateMark`."""

_Target = TypeVar("_Target", bound=type[RocketMQTemplate])
_MIDDLEWARES = "middlewares"
_INHERITED = -1
"""Value of rocketmq-spring for a number that the application's own producer sets."""


class _ClientAttributes(TypedDict, total=False):
    """Attributes that both decorators have: the keys of ``rocketmq.templates.<name>`` with the same name.

    *middlewares*, which is not a key, has the middlewares around each send, in place of the application's, the
    outermost first: objects, classes that the application builds, or dotted names of these.

    Each text may hold placeholders ``${key:default}``.
    """

    name_server: str
    access_channel: str
    access_key: str
    secret_key: str
    tls_enable: bool | str
    namespace: str
    namespace_v2: str
    instance_name: str
    enable_msg_trace: bool | str
    customized_trace_topic: str
    middlewares: Sequence[object] | str


class ExtTemplateAttributes(_ClientAttributes, total=False):
    """Attributes of ``@ext_template``. Source: rocketmq-spring, ``@ExtRocketMQTemplateConfiguration``."""

    group: str
    send_message_timeout: Duration
    compress_message_body_threshold: int
    retry_times_when_send_failed: int
    retry_times_when_send_async_failed: int
    retry_next_server: bool | str
    max_message_size: int


class ExtConsumerAttributes(_ClientAttributes, total=False):
    """Attributes of ``@ext_consumer``. Source: rocketmq-spring, ``@ExtRocketMQConsumerConfiguration``."""

    group: str
    topic: str
    message_model: MessageModel | str
    selector_type: SelectorType | str
    selector_expression: str
    pull_batch_size: int


_RECEIVING = frozenset(ExtConsumerAttributes.__annotations__) - frozenset(_ClientAttributes.__annotations__)


@dataclass(frozen=True, slots=True)
class ExtTemplateMark:
    """Attributes of one decorated class.

    Attributes:
        name: Name of the template, and of its section ``rocketmq.templates.<name>``.
        keys: Keys of that section, as the decorator gives them.
        middlewares: Middlewares of the template, objects or classes; None: the application's.
    """

    name: str
    keys: Mapping[str, Any]
    middlewares: tuple[object, ...] | None = None


def ext_template(value: str = "", **attributes: Unpack[ExtTemplateAttributes]) -> Callable[[_Target], _Target]:
    """Make a class derived from `RocketMQTemplate` a further template of the application.

    ::

        @ext_template("audit")  # with the keys of rocketmq.templates.audit
        class AuditTemplate(RocketMQTemplate): ...


        @ext_template(name_server="${audit.name-server}", group="audit")  # with the keys given here
        class AuditTemplate(RocketMQTemplate): ...

    It is injected by its class, or as ``Annotated[RocketMQTemplate, Named("audit")]``. A key in the configuration wins
    over an attribute. A number of -1 means the number of ``rocketmq.producer``.

    Args:
        value: Name of the template; by default the name of the class in snake_case.

    Raises:
        DependencyError: The class is not derived from `RocketMQTemplate`.
        ConfigurationError: An object is not a middleware, or has no ``send``.
        TypeError: An attribute has an unknown name.
    """
    refuse_bare("@ext_template", value, "@ext_template()", DependencyError)
    return _mark("@ext_template", value, attributes, ExtTemplateAttributes, lambda keys: keys)


def ext_consumer(value: str = "", **attributes: Unpack[ExtConsumerAttributes]) -> Callable[[_Target], _Target]:
    """Make a class derived from `RocketMQTemplate` a further template whose ``receive`` has a subscription of its own.

    *group* and *topic* belong to ``receive``: they are keys below ``rocketmq.templates.<name>.pull-consumer``.
    Otherwise as `ext_template`.
    """
    refuse_bare("@ext_consumer", value, "@ext_consumer()", DependencyError)
    return _mark("@ext_consumer", value, attributes, ExtConsumerAttributes, _as_subscription)


def _as_subscription(keys: Mapping[str, Any]) -> Mapping[str, Any]:
    own = {name: value for name, value in keys.items() if name not in _RECEIVING}
    subscription = {name: value for name, value in keys.items() if name in _RECEIVING}
    return {**own, "pull_consumer": subscription} if subscription else own


def _mark(
    decorator: str,
    name: str,
    attributes: Mapping[str, Any],
    declaration: type,
    to_keys: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> Callable[[_Target], _Target]:
    known = {**_ClientAttributes.__annotations__, **declaration.__annotations__}
    for attribute in attributes:
        if attribute not in known:
            raise TypeError(f"{decorator} has no attribute {attribute!r}; known attributes are {', '.join(known)}")
    given = {key: value for key, value in attributes.items() if key != _MIDDLEWARES and value != _INHERITED}
    own = _read_middlewares(decorator, attributes[_MIDDLEWARES]) if _MIDDLEWARES in attributes else None

    def mark(target: _Target) -> _Target:
        if not _is_template_class(target):
            raise DependencyError(
                f"{decorator}: {name_of(target)} is not derived from RocketMQTemplate; "
                f"write 'class {getattr(target, '__name__', 'Audit')}(RocketMQTemplate): ...'"
            )
        setattr(
            target, EXT_TEMPLATE_ATTRIBUTE, ExtTemplateMark(name or snake_case(target.__name__), to_keys(given), own)
        )
        return target

    return mark


def _read_middlewares(decorator: str, given: Any) -> tuple[object, ...]:
    """Return the middlewares of a decorator.

    Raises:
        ConfigurationError: One of them is not a middleware, or does nothing for a template.
    """
    try:
        found = read_middlewares(given)
    except (ValueError, AttributeError):
        raise ConfigurationError(
            f"{decorator}: middlewares must be objects, classes, or dotted names of these, got {given!r}"
        ) from None
    for each in found:
        check_middleware(each)
        if not hasattr(each, "send"):
            raise ConfigurationError(
                f"{decorator}: middlewares: {middleware_name(each)} has no send, so it does nothing for a template; "
                "give it to a listener"
            )
    return found


def _is_template_class(target: object) -> bool:
    return inspect.isclass(target) and issubclass(target, RocketMQTemplate)


def ext_template_mark(target: object) -> ExtTemplateMark | None:
    """Return the mark of this very class; None if it has no mark, or only a base class has one."""
    mark: ExtTemplateMark | None = getattr(target, "__dict__", {}).get(EXT_TEMPLATE_ATTRIBUTE)
    return mark


_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_RESERVED = frozenset({"template", "rocketmq_template", "rocketmqTemplate", "broker"})


@dataclass(frozen=True, slots=True)
class TemplateSpec:
    """One further template.

    Attributes:
        kind: Class to build.
        settings: Settings of the application with the keys of this template.
        names_broker: True: the template names its broker; False: it uses the broker of the application.
        middlewares: Middlewares of its own, objects or classes; None: the application's.
    """

    name: str
    kind: type[RocketMQTemplate]
    settings: AppSettings
    names_broker: bool
    middlewares: tuple[object, ...] | None = None


def template_specs(settings: AppSettings, components: tuple[object, ...]) -> Iterator[TemplateSpec]:
    """Yield the templates of the sections ``rocketmq.templates.*`` and of decorated classes.

    Raises:
        ConfigurationError: A name is not allowed or used twice, a class lacks its section, or a key is invalid.
    """
    sections = settings.rocketmq.templates
    classes: dict[str, type[RocketMQTemplate]] = {}
    for component in components:
        mark = ext_template_mark(component)
        if mark is None or not isinstance(component, type):
            continue
        with pointing_to(component):
            if (twin := classes.get(mark.name)) is not None:
                raise ConfigurationError(
                    f"{name_of(twin)} and {name_of(component)} are both the template {mark.name!r}; give one of them "
                    'another name: @ext_template("name")'
                )
            classes[mark.name] = component
            yield _of_class(settings, component, mark, sections.get(mark.name))
    for name, section in sections.items():
        if name not in classes:
            yield _spec(settings, name, RocketMQTemplate, section)


def _of_class(
    settings: AppSettings, kind: type[RocketMQTemplate], mark: ExtTemplateMark, section: TemplateSettings | None
) -> TemplateSpec:
    if section is None and not mark.keys:
        known = ", ".join(settings.rocketmq.templates) or "none"
        raise ConfigurationError(
            f"{name_of(kind)} is the template {mark.name!r}, and there is no section rocketmq.templates.{mark.name} "
            f"(there is: {known}); write that section, or give the decorator name_server="
        )
    spec = _spec(settings, mark.name, kind, _merged(settings, kind, mark, section))
    return replace(spec, middlewares=mark.middlewares)


def _merged(
    settings: AppSettings, kind: type[RocketMQTemplate], mark: ExtTemplateMark, section: TemplateSettings | None
) -> TemplateSettings:
    """Return the keys of the decorator, replaced by the keys of the section."""
    given = _resolved(settings, mark.keys, f"{name_of(kind)}: @ext_template")
    if section is not None:
        written = section.model_dump(exclude_unset=True, exclude={"pull_consumer"})
        receiving = {**given.get("pull_consumer", {}), **section.pull_consumer.model_dump(exclude_unset=True)}
        given = {**given, **written, **({"pull_consumer": receiving} if receiving else {})}
    try:
        return TemplateSettings(**given)
    except ValidationError as exc:
        problems = "; ".join(
            f"{'.'.join(map(str, each['loc'])) or 'attributes'}: {message_of(each)}" for each in exc.errors()
        )
        raise ConfigurationError(f"{name_of(kind)}: the attributes of its decorator are invalid: {problems}") from None


def _resolved(settings: AppSettings, keys: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return the keys with their placeholders replaced. An empty text counts as not given."""
    values = {
        name: _resolved(settings, value, origin) if isinstance(value, Mapping) else settings.resolve(value, origin)
        for name, value in keys.items()
    }
    return {name: value for name, value in values.items() if value != ""}


def _spec(settings: AppSettings, name: str, kind: type[RocketMQTemplate], given: TemplateSettings) -> TemplateSpec:
    origin = f"{settings.origins.of(f'rocketmq.templates.{name}')}: rocketmq.templates.{name}"
    if name in _RESERVED:
        raise ConfigurationError(f"{origin}: {name!r} is the application's own; choose another name")
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{origin}: {name!r} is not a name of a template; use letters, digits, '_' and '-', and start with a letter"
        )
    return TemplateSpec(name, kind, settings_of_template(settings, given, name), given.name_server is not None)


class Clusters(FurtherBrokers):
    """All brokers of one application. Two clusters never share a client.

    - A store directory has one broker, for all templates and listeners that name it.
    - ``embedded:memory`` is a store of its own for each template that names it.
    - A cluster has a client for each template that names it, or that uses it without a name, because a client has one
      producer group and one account; and one for all listeners that name its address with the same account.
    """

    def __init__(self, context: ApplicationContext) -> None:
        self._context = context
        self._of_template: dict[str, Definition] = {}
        self._of_folder: dict[Path, Definition] = {}
        self._address_of_template: dict[str, object] = {}
        self._of_listeners: dict[object, NamedBroker] = {}
        self._starts = True

    # --- templates -----------------------------------------------------------------------------

    def add_template(self, spec: TemplateSpec) -> Definition:
        """Return the definition of the broker of a template; add one if no other template has it.

        Raises:
            UnsupportedError: A key is set that the broker does not support.
            ConfigurationError: The keys of the template contradict each other.
        """
        factory = self._factory(spec.settings)
        shared = self._shared(spec)
        definition = self._own(spec, factory) if shared is None else shared
        if shared is not None:
            self._context.add_alias(spec.name, shared)
        self._of_template[spec.name] = definition
        self._address_of_template[spec.name] = _address(spec.settings)
        return definition

    def _factory(self, settings: AppSettings) -> BrokerFactory:
        """Return the factory of the broker that settings choose; a starter has it, and checks the settings."""
        for find in self._context.broker_factories:
            if (factory := find(settings)) is not None:
                return factory
        raise ConfigurationError(
            f"no starter creates a broker for name-server {settings.rocketmq.name_server!r}; install mqtemplate with "
            "its starters, or remove the name from mqtemplate.autoconfigure.exclude"
        )

    def _shared(self, spec: TemplateSpec) -> Definition | None:
        """Return the broker of another template or of the application, if this template has to use it too."""
        own = self._context.definition_for(Broker)
        if spec.settings.is_embedded:
            folder = spec.settings.store_path
            is_own = not spec.names_broker or (folder is not None and folder == self._context.settings.store_path)
            return own if is_own else self._of_folder.get(folder) if folder is not None else None
        # A broker that the program or a test gave stands for the cluster of the application.
        return own if not spec.names_broker and not own.origin.startswith("starter") else None

    def _own(self, spec: TemplateSpec, factory: BrokerFactory) -> Definition:
        kind = type_hints(factory)["return"]
        clock = self._context.definition_for(Clock)
        definition = self._context.add_qualified(spec.name, kind, lambda clock: factory(spec.settings, clock), [clock])
        if (folder := spec.settings.store_path) is not None and spec.settings.is_embedded:
            self._of_folder[folder] = definition
        return definition

    def _clock(self) -> Clock:
        clock: Clock = self._context.build(self._context.definition_for(Clock))
        return clock

    def start_nothing(self) -> None:
        """Build the brokers of listeners from now on, and do not start them: the application is only checked."""
        self._starts = False

    def definitions(self) -> Iterator[tuple[str, Definition]]:
        """Yield the brokers that templates have beside the application's own, each once."""
        seen = {self._context.definition_for(Broker)}
        for name, definition in self._of_template.items():
            if definition not in seen:
                seen.add(definition)
                yield name, definition

    def brokers(self) -> list[NamedBroker]:
        return [
            *(NamedBroker(name, self._context.build(definition)) for name, definition in self.definitions()),
            *self._of_listeners.values(),
        ]

    # --- listeners -----------------------------------------------------------------------------

    def broker_of(self, listener: str, choice: ClusterChoice) -> Broker:
        """Return the broker of a listener that names a cluster. A client for a new address is started.

        Raises:
            ListenerError: The name is unknown, or the form of the address is not allowed.
            UnsupportedError: The broker does not support an attribute.
            RemoteConnectError: No name server answers.
        """
        found = self._by_name(listener, choice) if choice.broker else self._by_address(listener, choice)
        return found if found is not None else self._opened(listener, choice)

    def _by_name(self, listener: str, choice: ClusterChoice) -> Broker:
        definition = self._of_template.get(choice.broker)
        if definition is None:
            known = ", ".join(sorted(self._of_template)) or "none"
            raise ListenerError(
                f"listener {listener}: broker={choice.broker!r}, and there is no template of that name (there is: "
                f"{known}); write a section rocketmq.templates.{choice.broker}, or give name_server="
            )
        if choice != ClusterChoice(broker=choice.broker):
            raise ListenerError(
                f"listener {listener}: an account, a namespace or TLS is given beside broker={choice.broker!r}; the "
                f"client of that template has its own; set them in rocketmq.templates.{choice.broker}"
            )
        broker: Broker = self._context.build(definition)
        return broker

    def _by_address(self, listener: str, choice: ClusterChoice) -> Broker | None:
        """Return the broker that a listener without an account of its own shares; None if it needs a new client."""
        try:
            parsed = parse_name_server(choice.name_server)
        except ValueError as exc:
            raise ListenerError(
                f"listener {listener}: name_server: {masked_text(str(exc))}, got {masked(choice.name_server)!r}"
            ) from exc
        if choice != ClusterChoice(name_server=choice.name_server):
            return None
        address = _address_of(parsed, self._context.settings)
        if address == _address(self._context.settings):
            broker: Broker = self._context.build(self._context.definition_for(Broker))
            return broker
        named = (name for name, other in self._address_of_template.items() if other == address)
        found = next(named, None)
        return None if found is None else self._context.build(self._of_template[found])

    def _opened(self, listener: str, choice: ClusterChoice) -> Broker:
        key = self._key(choice)
        if key not in self._of_listeners:
            settings = self._settings_for(listener, choice)
            broker = self._factory(settings)(settings, self._clock())
            if self._starts:
                start_broker(broker, f"listener {listener}: name_server={masked(choice.name_server)!r}")
                self._context.lifecycle.push(f"broker {choice.name_server}", broker.close)
            self._of_listeners[key] = NamedBroker(choice.name_server, broker)
        return self._of_listeners[key].broker

    def _key(self, choice: ClusterChoice) -> object:
        """Return a value that is equal for listeners that share a client: the same address and account."""
        parsed = parse_name_server(choice.name_server)
        if isinstance(parsed, EmbeddedStore) and parsed.in_memory:
            return choice
        return _address_of(parsed, self._context.settings), replace(choice, name_server="")

    def _settings_for(self, listener: str, choice: ClusterChoice) -> AppSettings:
        given: dict[str, Any] = {
            name: value
            for name in ClusterChoice.__dataclass_fields__
            if name != "broker" and (value := getattr(choice, name))
        }
        try:
            keys = TemplateSettings(**given)
        except ValidationError as exc:
            reasons = "; ".join(map(message_of, exc.errors()))
            raise ListenerError(f"listener {listener}: name_server={masked(choice.name_server)!r}: {reasons}") from None
        return settings_of_template(self._context.settings, keys, f"listener {listener}")


def start_broker(broker: Broker, title: str) -> None:
    """Start a broker. An error of the start names the template or listener that needs it."""
    try:
        broker.start()
    except Exception as exc:
        exc.add_note(f"while starting the broker of {title}")
        raise


def _address(settings: AppSettings) -> object:
    return _address_of(settings.broker_choice, settings)


def _address_of(choice: object, settings: AppSettings) -> object:
    """Return a value that is equal for two names of one cluster or folder; each store in memory differs."""
    if not isinstance(choice, EmbeddedStore):
        return frozenset(choice.addresses)  # type: ignore[attr-defined]  # of a cluster or a proxy
    return settings.folder_of(choice) or object()


def register_templates(context: ApplicationContext) -> None:
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
    """Return the converter that a listener names by its class: the application's object, else a new one."""
    found: Any = context.get(kind) if context.has(kind) else context.call(kind)
    converter: MessageConverter = found
    return converter


def _register_template(spec: TemplateSpec, clusters: Clusters, context: ApplicationContext) -> None:
    broker = clusters.add_template(spec)
    converter = context.definition_for(MessageConverter)
    observation = context.definition_for(Observation)
    trace_of = context.built_in.trace_of()

    shared = context.middlewares("send") if spec.middlewares is None else []

    def build(
        broker: Broker, converter: MessageConverter, observation: Observation, *middlewares: object
    ) -> RocketMQTemplate:
        own = [_middleware(each, context) for each in spec.middlewares or ()]
        rocketmq, around = spec.settings.rocketmq, (*middlewares, *own)
        return new_template(spec.kind, broker, converter, rocketmq, trace_of, observation, middlewares=around)

    context.add_qualified(spec.name, spec.kind, build, [broker, converter, observation, *shared])


def _middleware(given: object, context: ApplicationContext) -> object:
    """Return a middleware of one template: an object as it is; for a class the application's object, else a new one."""
    if not isinstance(given, type):
        return given
    definition = context.definition_of(given)
    return context.call(given) if definition is None else context.build(definition)
