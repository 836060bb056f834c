"""Creates the client of a RocketMQ cluster or of a proxy, unless the application has a broker."""

from mqtemplate import Broker
from mqtemplate.context import (
    ApplicationContext,
    AppSettings,
    AutoConfiguration,
    BrokerFactory,
    grpc_settings,
    register_broker,
    remote_settings,
)


class RocketMQAutoConfiguration(AutoConfiguration):
    """Starter that adds a `RemoteBroker` or a `GrpcBroker`; it backs off if the application has a `Broker`."""

    after = ("logging",)

    def condition(self, settings: AppSettings) -> bool | str:
        return not settings.is_embedded or "rocketmq.name-server names no cluster, and rocketmq.endpoints no proxy"

    def broker_factory(self, settings: AppSettings) -> BrokerFactory | None:
        if settings.is_embedded:
            return None
        _check(settings)
        return _broker_factory(settings)

    def contribute(self, context: ApplicationContext) -> None:
        """Register the broker. It connects when the application starts it.

        Raises:
            UnsupportedError: A key is set that a cluster, or the protocol of a proxy, does not support.
            ConfigurationError: Two sections set a key of the client to different values.
        """
        if not context.has(Broker):
            _check(context.settings)
        register_broker(context, _broker_factory(context.settings))


def _check(settings: AppSettings) -> None:
    if settings.is_proxy:
        grpc_settings(settings)
    else:
        remote_settings(settings)


def _broker_factory(settings: AppSettings) -> BrokerFactory:
    """Return the function that creates the broker. The broker is imported here: the entry point names this module."""
    from mqtemplate import Clock

    # The application reads these annotations, so this module does not import them from `__future__`.
    if settings.is_proxy:
        from mqtemplate import GrpcBroker

        def grpc_broker(settings: AppSettings, clock: Clock) -> GrpcBroker:
            return GrpcBroker(grpc_settings(settings), clock)

        return grpc_broker
    from mqtemplate import RemoteBroker

    def remote_broker(settings: AppSettings, clock: Clock) -> RemoteBroker:
        return RemoteBroker(remote_settings(settings), clock)

    return remote_broker
