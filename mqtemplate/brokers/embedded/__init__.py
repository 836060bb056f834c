"""The embedded broker: the `Broker` interface over a store in this process."""
