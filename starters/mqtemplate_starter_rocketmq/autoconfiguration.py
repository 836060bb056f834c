"""Creates the client of a RocketMQ cluster, unless the application has a broker."""

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
        return _broker_factory()

    def contribute(self, context: ApplicationContext) -> None:
        """Register the broker. It connects to the cluster when the application starts it.

        Raises:
            UnsupportedError: A key is set that a cluster does not support.
            ConfigurationError: Two sections set a key of the client to different values.
        """
        if not context.has(Broker):
            remote_settings(context.settings)  # only checked here
        context.register(_broker_factory(), name="broker")


def _broker_factory() -> BrokerFactory:
    """Return the function that creates the broker. The broker is imported here: the entry point names this module."""
    from mqtemplate import Clock, RemoteBroker

    # The application reads these annotations, so this module does not import them from `__future__`.
    def remote_broker(settings: AppSettings, clock: Clock) -> RemoteBroker:
        return RemoteBroker(remote_settings(settings), clock)

    return remote_broker
