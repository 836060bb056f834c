"""Remote broker: the `Broker` interface over RocketMQ's remoting protocol."""
