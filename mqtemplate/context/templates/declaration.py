"""Further templates: ``@ext_template`` and ``@ext_consumer``, which only note attributes, and sections of settings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, TypeVar, Unpack

from pydantic import ValidationError

from mqtemplate.broker import MessageModel
from mqtemplate.calls.middlewares import check_middleware, read_middlewares
from mqtemplate.calls.middlewares import name_of as middleware_name
from mqtemplate.context.config.binding import message_of
from mqtemplate.context.injection.marks import name_of, pointing_to
from mqtemplate.context.injection.wiring import snake_case
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.clients import settings_of_template
from mqtemplate.context.settings.rocketmq import TemplateSettings
from mqtemplate.durations import Duration
from mqtemplate.errors import ConfigurationError, DependencyError
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

    *middlewares*, which is no key, has the middlewares around each send, in place of those of the application, the
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
        middlewares: Middlewares of the template, objects or classes; None: those of the application.
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
    over an attribute. A number of -1 means that of ``rocketmq.producer``.

    Args:
        value: Name of the template; by default that of the class in snake_case.

    Raises:
        DependencyError: The class is not derived from `RocketMQTemplate`.
        ConfigurationError: A middleware is none, or has no ``send``.
        TypeError: An attribute has an unknown name.
    """
    return _mark("@ext_template", value, attributes, ExtTemplateAttributes, lambda keys: keys)


def ext_consumer(value: str = "", **attributes: Unpack[ExtConsumerAttributes]) -> Callable[[_Target], _Target]:
    """Make a class derived from `RocketMQTemplate` a further template whose ``receive`` has a subscription of its own.

    *group* and *topic* are those of ``receive``: the keys below ``rocketmq.templates.<name>.pull-consumer``. Otherwise
    as `ext_template`.
    """
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
        ConfigurationError: One of them is none, or does nothing for a template.
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
    """Return the mark of this very class; None if it has none, or only a base class has one."""
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
        middlewares: Middlewares of its own, objects or classes; None: those of the application.
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
    """Return the keys of the decorator, replaced by those of the section."""
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
            f"{origin}: {name!r} is no name of a template; use letters, digits, '_' and '-', and start with a letter"
        )
    return TemplateSpec(name, kind, settings_of_template(settings, given, name), given.name_server is not None)
