"""Makes the remote broker, unless the application has a broker already."""

from __future__ import annotations

from mqtemplate import Broker, Clock, RemoteBroker
from mqtemplate.context import ApplicationContext, AppSettings, AutoConfiguration, remote_settings

__all__ = ["RocketMQAutoConfiguration", "remote_broker"]


class RocketMQAutoConfiguration(AutoConfiguration):
    """Contributes a `RemoteBroker`; backs off for a `Broker` that the application was given."""

    after = ("logging",)

    def condition(self, settings: AppSettings) -> bool | str:
        return not settings.names_no_cluster or "rocketmq.name-server names no cluster"

    def contribute(self, context: ApplicationContext) -> None:
        """Register the broker; it looks for the cluster later, when the application starts it.

        Raises:
            UnsupportedError: A key asks for what a cluster cannot do.
            ConfigurationError: Two keys say who this client is, and differ.
        """
        if not context.has(Broker):
            remote_settings(context.settings)
        context.register(remote_broker, name="broker")


def remote_broker(settings: AppSettings, clock: Clock) -> RemoteBroker:
    """The broker that the settings describe."""
    return RemoteBroker(remote_settings(settings), clock)
