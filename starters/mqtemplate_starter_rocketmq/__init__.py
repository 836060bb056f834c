"""Starter: a client of the RocketMQ cluster that ``rocketmq.name-server: host:port;host:port`` names."""

from mqtemplate_starter_rocketmq.autoconfiguration import RocketMQAutoConfiguration

__all__ = ["RocketMQAutoConfiguration"]
