"""Starter of a RocketMQ cluster's client, for ``rocketmq.name-server: host:port;host:port``."""

from mqtemplate_starter_rocketmq.autoconfiguration import RocketMQAutoConfiguration

__all__ = ["RocketMQAutoConfiguration"]
