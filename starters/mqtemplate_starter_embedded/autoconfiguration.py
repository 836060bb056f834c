"""Creates the embedded broker, unless the application has a broker."""

from __future__ import annotations

from mqtemplate import Broker, Clock, EmbeddedBroker
from mqtemplate.context import ApplicationContext, AppSettings, AutoConfiguration, check_embedded_support, unneeded_keys
from mqtemplate.event_log import get_logger

_log = get_logger("mqtemplate.starter.embedded")


class EmbeddedAutoConfiguration(AutoConfiguration):
    """Starter that adds an `EmbeddedBroker`; it backs off if the application has a `Broker`."""

    after = ("logging",)

    def condition(self, settings: AppSettings) -> bool | str:
        if not settings.mqtemplate.embedded.enabled:
            return "mqtemplate.embedded.enabled is false"
        return settings.is_embedded or "rocketmq.name-server names a cluster"

    def contribute(self, context: ApplicationContext) -> None:
        """Register the broker. It opens its files when the application starts it.

        Raises:
            UnsupportedError: A key is set that the embedded broker does not support.
        """
        if not context.has(Broker):
            check_embedded_support(context.settings)
            for key, reason in unneeded_keys(context.settings):
                _log.debug("config.key_unneeded", key=key, reason=reason)
        context.register(embedded_broker, name="broker")


def embedded_broker(settings: AppSettings, clock: Clock) -> EmbeddedBroker:
    """Return the broker for the settings."""
    return EmbeddedBroker(settings.store_path, settings.mqtemplate.broker, clock)
