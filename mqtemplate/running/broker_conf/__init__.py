"""Property files of RocketMQ's broker."""

from mqtemplate.running.broker_conf.broker_conf import BrokerConf, read_broker_conf

__all__ = ["BrokerConf", "read_broker_conf"]
