"""Starter: the embedded broker, from ``rocketmq.name-server`` and ``mqtemplate.broker.*``."""

from mqtemplate_starter_embedded.autoconfiguration import EmbeddedAutoConfiguration

__all__ = ["EmbeddedAutoConfiguration"]
