"""The further templates that the configuration and the classes of an application declare."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from mqtemplate.context.failure_report import pointing_to
from mqtemplate.context.injection.marks import name_of
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.clients import settings_of_template
from mqtemplate.context.settings.rocketmq import TemplateSettings
from mqtemplate.context.templates.decorator import ExtTemplateMark, ext_template_mark
from mqtemplate.errors import ConfigurationError
from mqtemplate.template.rocketmq_template import RocketMQTemplate

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
            f"{'.'.join(map(str, each['loc'])) or 'attributes'}: {each['msg'].removeprefix('Value error, ')}"
            for each in exc.errors()
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
