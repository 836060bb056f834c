"""Starter of the embedded broker, for ``rocketmq.name-server: embedded`` and ``mqtemplate.broker.*``."""

from mqtemplate_starter_embedded.autoconfiguration import EmbeddedAutoConfiguration

__all__ = ["EmbeddedAutoConfiguration"]
