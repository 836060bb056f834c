"""Makes the broker of this process, unless the application has one already."""

from __future__ import annotations

import structlog

from mqtemplate import Broker, Clock, EmbeddedBroker, EmbeddedSettings
from mqtemplate.context import (
    ApplicationContext,
    AppSettings,
    AutoConfiguration,
    check_embedded_support,
    unneeded_keys,
)

__all__ = ["EmbeddedAutoConfiguration", "embedded_broker"]

_log = structlog.stdlib.get_logger("mqtemplate.starter.embedded")


class EmbeddedAutoConfiguration(AutoConfiguration):
    """Contributes an `EmbeddedBroker`; backs off for a `Broker` that the application was given."""

    after = ("logging",)

    def condition(self, settings: AppSettings) -> bool | str:
        if not settings.mqtemplate.embedded.enabled:
            return "mqtemplate.embedded.enabled is false"
        return settings.names_no_cluster or "rocketmq.name-server names a cluster"

    def contribute(self, context: ApplicationContext) -> None:
        """Register the broker; it opens its files later, when the application starts it.

        Raises:
            UnsupportedError: A key asks for what the embedded broker cannot do.
        """
        if not context.has(Broker):
            check_embedded_support(context.settings)
            for key, reason in unneeded_keys(context.settings):
                _log.info("config.key_unneeded", key=key, reason=reason)
        context.register(embedded_broker, name="broker")


def embedded_broker(settings: AppSettings, clock: Clock) -> EmbeddedBroker:
    """The broker that the settings describe."""
    own = dict(settings.mqtemplate.broker)
    del own["store_path"]
    return EmbeddedBroker(settings.store_path, EmbeddedSettings(**own), clock)
