"""The wire: what RocketMQ's clients, brokers and name servers say to each other over TCP."""

__all__ = ()
