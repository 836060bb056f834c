"""The extension for Flask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from flask import Flask, Response, current_app, has_app_context, jsonify

from mqtemplate.context import MQApplication
from mqtemplate.errors import ConfigurationError, DependencyError, MQTemplateError
from mqtemplate.running.hosting import HealthAnswer, ProcessApplication, health_of
from mqtemplate.template import RocketMQTemplate

T = TypeVar("T")

_NAME = "mqtemplate"
_SETTINGS, _HEALTH = "MQTEMPLATE", "MQTEMPLATE_HEALTH_URL"


class FlaskMQTemplate:
    """Flask extension: one `MQApplication` for each process, started by its first use.

    ::

        messages = MQTemplate("shop.listeners")


        def create_app() -> Flask:
            web = Flask(__name__)
            messages.init_app(web)
            return web

    Each call of a handler has an application context of its own, so ``current_app``, ``g`` and extensions such as
    Flask-SQLAlchemy work, and ``teardown_appcontext`` runs after it.

    ``app.config["MQTEMPLATE"]`` has keys as `MQApplication` takes them in ``settings``.
    ``app.config["MQTEMPLATE_HEALTH_URL"]`` is the URL of a route for readiness probes; by default there is no such
    route.

    Args:
        components: Components of `MQApplication`.
        app: Flask application, if there is one already.
        options: Options of `MQApplication`.
    """

    def __init__(self, *components: object, app: Flask | None = None, **options: Any) -> None:
        self._components = components
        self._options = options
        self._apps: list[Flask] = []
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Connect a Flask application. Nothing is started.

        Raises:
            ConfigurationError: ``MQTEMPLATE`` of its configuration is not a mapping.
        """
        settings = app.config.get(_SETTINGS, {})
        if not isinstance(settings, Mapping):
            raise ConfigurationError(
                f"{_SETTINGS} in the configuration of Flask must be a mapping of keys, got {settings!r}; "
                "write {'rocketmq.name-server': ...}"
            )
        options = dict(self._options)
        if settings:
            options["settings"] = {**dict(options.get("settings") or {}), **settings}
        process = ProcessApplication(*self._components, **options)
        process.prepare(lambda messages: messages.context.add_handler_scope(app.app_context))
        app.extensions[_NAME] = process
        setattr(app, "__mqtemplate__", process)  # noqa: B010  # `mqtemplate run` finds it; Flask declares no such attribute
        self._apps.append(app)
        url = app.config.get(_HEALTH)
        if url:
            app.add_url_rule(url, "mqtemplate_health", lambda: _health(process))

    @property
    def process(self) -> ProcessApplication:
        """The application of the current Flask application; outside of one, of the only one."""
        if has_app_context():
            found = current_app.extensions.get(_NAME)
            if isinstance(found, ProcessApplication):
                return found
        elif len(self._apps) == 1:
            found = self._apps[0].extensions[_NAME]
            assert isinstance(found, ProcessApplication)
            return found
        raise DependencyError(
            "there is no Flask application here for which init_app was called; call messages.init_app(app), and "
            "outside of requests use 'with app.app_context():'"
        )

    @property
    def application(self) -> MQApplication:
        """The started application of this process."""
        return self.process.application

    @property
    def template(self) -> RocketMQTemplate:
        """The template of this process."""
        return self.process.template

    def get(self, wanted: type[T], name: str | None = None) -> T:
        """Return an object of the application by its type."""
        return self.process.get(wanted, name)


def _health(process: ProcessApplication) -> tuple[Response, int]:
    """Return the readiness. WSGI has no start of a process, so the first probe starts the messages."""
    try:
        health = health_of(process.start())
    except MQTemplateError as exc:
        health = HealthAnswer(503, {"status": "DOWN", "reason": str(exc)})
    return jsonify(health.body), health.status_code
