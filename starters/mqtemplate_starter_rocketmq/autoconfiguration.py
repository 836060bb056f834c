"""Creates the client of a RocketMQ cluster, unless the application has a broker."""

from __future__ import annotations

from mqtemplate import Broker
from mqtemplate.context import ApplicationContext, AppSettings, AutoConfiguration, BrokerFactory, remote_settings


class RocketMQAutoConfiguration(AutoConfiguration):
    """Starter that adds a `RemoteBroker`; it backs off if the application has a `Broker`."""

    after = ("logging",)

    def condition(self, settings: AppSettings) -> bool | str:
        return not settings.is_embedded or "rocketmq.name-server names no cluster"

    def broker_factory(self, settings: AppSettings) -> BrokerFactory | None:
        if settings.is_embedded:
            return None
        remote_settings(settings)  # only checked here
        from mqtemplate_starter_rocketmq.broker import remote_broker

        return remote_broker

    def contribute(self, context: ApplicationContext) -> None:
        """Register the broker. It connects to the cluster when the application starts it.

        Raises:
            UnsupportedError: A key is set that a cluster does not support.
            ConfigurationError: Two sections set a key of the client to different values.
        """
        if not context.has(Broker):
            remote_settings(context.settings)  # only checked here
        from mqtemplate_starter_rocketmq.broker import remote_broker

        context.register(remote_broker, name="broker")
