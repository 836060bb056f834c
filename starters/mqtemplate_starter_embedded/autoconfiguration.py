"""Creates the embedded broker, unless the application has a broker."""

from mqtemplate import Broker
from mqtemplate.context import (
    ApplicationContext,
    AppSettings,
    AutoConfiguration,
    BrokerFactory,
    check_embedded_support,
    register_broker,
    unneeded_keys,
)
from mqtemplate.errors import ConfigurationError
from mqtemplate.event_log import get_logger

_log = get_logger("mqtemplate.starter.embedded")


_PRODUCTION = frozenset({"prod", "production"})


class EmbeddedAutoConfiguration(AutoConfiguration):
    """Starter that adds an `EmbeddedBroker`; it backs off if the application has a `Broker`."""

    after = ("logging",)

    def condition(self, settings: AppSettings) -> bool | str:
        if not settings.mqtemplate.embedded.enabled:
            return "mqtemplate.embedded.enabled is false"
        return settings.is_embedded or "rocketmq.name-server names a cluster"

    def broker_factory(self, settings: AppSettings) -> BrokerFactory | None:
        if not settings.is_embedded:
            return None
        check_embedded_support(settings)
        return _broker_factory()

    def contribute(self, context: ApplicationContext) -> None:
        """Register the broker. It opens its files when the application starts it.

        Raises:
            UnsupportedError: A key is set that the embedded broker does not support.
            ConfigurationError: Production, and the configuration names no broker.
        """
        if not context.has(Broker):
            _check_choice(context.settings)
            check_embedded_support(context.settings)
            for key, reason in unneeded_keys(context.settings):
                _log.debug("config.key_unneeded", key=key, reason=reason)
        register_broker(context, _broker_factory())


def _check_choice(settings: AppSettings) -> None:
    """Warn that the configuration names no broker; refuse that in production.

    Raises:
        ConfigurationError: A profile for production is active, and ``rocketmq.name-server`` is missing.
    """
    if "name_server" in settings.rocketmq.model_fields_set or settings.store_path is None:
        return
    folder, origins = settings.store_path, settings.origins
    read = ", ".join(origins.files) or f"no application.yml in {origins.folder}"
    production = sorted(_PRODUCTION.intersection(map(str.lower, origins.profiles)))
    if production:
        raise ConfigurationError(
            f"rocketmq.name-server is missing (configuration: {read}) and the profile {production[0]!r} is active: "
            f"messages would go to the local folder {folder}; set rocketmq.name-server to 'host:port' of a server or "
            "cluster, or to 'embedded' if that folder is meant"
        )
    _log.warning(
        "broker.local_folder",
        folder=str(folder),
        reason="rocketmq.name-server is not set, so messages stay on this machine",
        config=read,
        hint="set rocketmq.name-server: host:port of a server or cluster, or embedded if this folder is meant",
    )


def _broker_factory() -> BrokerFactory:
    """Return the function that creates the broker. The broker is imported here: the entry point names this module."""
    from mqtemplate import Clock, EmbeddedBroker

    # The application reads these annotations, so this module does not import them from `__future__`.
    def embedded_broker(settings: AppSettings, clock: Clock) -> EmbeddedBroker:
        if (path := settings.copied_path) is not None:
            from mqtemplate.copy import CopiedBroker

            return CopiedBroker(path, settings.mqtemplate.broker, clock, copy=settings.mqtemplate.copy_)
        return EmbeddedBroker(settings.store_path, settings.mqtemplate.broker, clock)

    return embedded_broker
