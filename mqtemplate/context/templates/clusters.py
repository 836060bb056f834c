"""The brokers of an application: its own, those of further templates, and those that listeners name by address."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from dependency_injector import providers
from pydantic import ValidationError

from mqtemplate.broker import Broker
from mqtemplate.calls.handling import Observation
from mqtemplate.calls.message_trace import Traces
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
from mqtemplate.context.injection.marks import type_hints
from mqtemplate.context.injection.wiring import Definition
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.clients import settings_of_template
from mqtemplate.context.settings.rocketmq import EmbeddedStore, TemplateSettings, parse_name_server
from mqtemplate.context.templates.declaration import TemplateSpec, template_specs
from mqtemplate.converter import MessageConverter
from mqtemplate.errors import ConfigurationError, ListenerError
from mqtemplate.listener.declaration.settings import ClusterChoice
from mqtemplate.template.rocketmq_template import RocketMQTemplate


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
        """Yield the brokers that templates have beside that of the application, each once."""
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
            ListenerError: The name is unknown, or the address has none of the allowed forms.
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
        return frozenset(choice.addresses)  # type: ignore[attr-defined]  # a ClusterAddresses
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
    """Return the converter that a listener names by its class: that of the application, else a new one."""
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
    """Return a middleware of one template: an object as it is, that of the application for a class, else a new one."""
    if not isinstance(given, type):
        return given
    definition = context.definition_of(given)
    return context.call(given) if definition is None else context.build(definition)
