"""The messages of a Django project: one `MQApplication` for each process, started by its first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Unpack

from django.apps import apps
from django.conf import settings
from django.core.signals import setting_changed
from django.db import transaction

from mqtemplate.context import AppSettings, MQApplication, load_settings
from mqtemplate.errors import ConfigurationError
from mqtemplate.results import SendResult
from mqtemplate.running import MQTemplateASGI, MQTemplateWSGI
from mqtemplate.running.hosting import ProcessApplication
from mqtemplate.template import RocketMQTemplate, SendOptions, shows_send_options
from mqtemplate.user_code import did_you_mean

_NAME = "MQTEMPLATE"
_OWN = ("COMPONENTS", "CONFIG_FOLDER", "PROFILES")
_LISTENERS = "listeners"


@dataclass(frozen=True, slots=True)
class Project:
    """The setting ``MQTEMPLATE``.

    Attributes:
        keys: Keys as in ``application.yml``, dotted or nested.
        components: Further components: names of modules, or objects.
        config_folder: Folder of ``application.yml``; None for the working directory.
        profiles: Active profiles.
    """

    keys: Mapping[str, object] = field(default_factory=dict)
    components: Sequence[object] = ()
    config_folder: Any = None
    profiles: Sequence[str] = ()


def read_project() -> Project:
    """Return the setting ``MQTEMPLATE`` of Django.

    Raises:
        ConfigurationError: It is not a mapping, or has an unknown name in capitals.
    """
    given = getattr(settings, _NAME, {})
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"settings.{_NAME} must be a mapping, got {given!r}; write {{'rocketmq.name-server': ...}}"
        )
    for name in given:
        if name.isupper() and name not in _OWN:
            hint = did_you_mean(name, _OWN, f"allowed are {', '.join(_OWN)} and keys of application.yml")
            raise ConfigurationError(f"settings.{_NAME} has an unknown name {name!r}; {hint}")
    return Project(
        {key: value for key, value in given.items() if key not in _OWN},
        given.get("COMPONENTS", ()),
        given.get("CONFIG_FOLDER"),
        given.get("PROFILES", ()),
    )


def listener_modules() -> list[Any]:
    """Import and return the module ``listeners`` of each installed app that has one."""
    names = [f"{config.name}.{_LISTENERS}" for config in apps.get_app_configs()]
    return [import_module(name) for name in names if find_spec(name) is not None]


_OUTBOX_APP = "mqtemplate.outbox.django"
_ENABLED = "mqtemplate.listener.enabled"
_process: ProcessApplication | None = None
_providers: list[Callable[[], Sequence[object]]] = []


def provide_components(provider: Callable[[], Sequence[object]]) -> None:
    """Let a Django app add components to the messages of each process; its ``AppConfig.ready`` calls this."""
    if provider not in _providers:
        _providers.append(provider)


def messages() -> ProcessApplication:
    """Return the messages of this project; nothing is started by that.

    Raises:
        ConfigurationError: ``settings.MQTEMPLATE`` is invalid.
    """
    global _process
    if _process is None:
        project = read_project()
        keys = dict(project.keys)
        if settings_of(project).origins.of(_ENABLED) == "default":
            keys[_ENABLED] = False  # a process of a web server sends, and others handle
        components = [*listener_modules(), *project.components]
        if apps.is_installed(_OUTBOX_APP):
            from mqtemplate.outbox.django import DjangoOutbox

            components.append(DjangoOutbox)
        components += [component for provide in _providers for component in provide()]
        _process = ProcessApplication(
            *components, settings=keys, config_folder=project.config_folder, profiles=tuple(project.profiles)
        )
    return _process


def settings_of(project: Project) -> AppSettings:
    """Return the settings of a project.

    Raises:
        ConfigurationError: A key is invalid.
    """
    return load_settings(project.config_folder, tuple(project.profiles), arguments=project.keys)


def new_application() -> MQApplication:
    """Return a new application that is not started, for ``mqtemplate run mqtemplate_starter_django:new_application``.

    It is the application of this process from then on: in handlers `template` and `outbox` are its own. If Django is
    not set up yet, it is: ``DJANGO_SETTINGS_MODULE`` names the settings.
    """
    if not apps.ready:
        import django

        django.setup()
    return messages().application_to_run()


def application() -> MQApplication:
    """Return the application of this process; the first use starts it."""
    return messages().application


def template() -> RocketMQTemplate:
    """Return the template of this process; the first use starts the application."""
    return messages().template


@shows_send_options
def send_on_commit(
    destination: str,
    payload: object,
    delay_level: int = 0,
    *,
    using: str = "default",
    on_sent: Callable[[SendResult], object] | None = None,
    **options: Unpack[SendOptions],
) -> None:
    """Send a message after the current transaction is committed; outside of one, at once.

    A transaction that is rolled back sends nothing. A process that dies between the commit and the send loses the
    message: `outbox` closes this gap with a table. A send that fails raises in the caller of the commit.

    Args:
        using: Alias of the database.
        on_sent: Called with the result.
        options: The options of ``template.sync_send``.
    """

    def send() -> None:
        result = template().sync_send(destination, payload, delay_level=delay_level, **options)
        if on_sent is not None:
            on_sent(result)

    transaction.on_commit(send, using=using)


def outbox() -> Any:
    """Return the `DjangoOutbox` of this process; its relay works in each process that uses the messages.

    Raises:
        ConfigurationError: The app of its tables is not installed.
    """
    if not apps.is_installed(_OUTBOX_APP):
        raise ConfigurationError(
            f"the outbox needs its tables; add {_OUTBOX_APP!r} to INSTALLED_APPS and run 'manage.py migrate'"
        )
    from mqtemplate.outbox.django import DjangoOutbox

    return application().get(DjangoOutbox)


def wsgi(app: Any) -> MQTemplateWSGI:
    """Return a WSGI application that starts the messages with its first request: ``wsgi(get_wsgi_application())``.

    It is needed only if a process of the web server runs listeners or the relay of the outbox.
    """
    return MQTemplateWSGI(app, messages())


def asgi(app: Any) -> MQTemplateASGI:
    """Return an ASGI application that starts and stops the messages with the server.

    In ``asgi.py``: ``application = asgi(get_asgi_application())``.
    """
    return MQTemplateASGI(app, messages())


def _forget(*, setting: str, **_: Any) -> None:
    """Stop the messages when a test changes their settings; the next use reads them again."""
    global _process
    if setting in (_NAME, "TASKS") and _process is not None:
        stopped, _process = _process, None
        stopped.stop()


setting_changed.connect(_forget, dispatch_uid="mqtemplate_starter_django")
