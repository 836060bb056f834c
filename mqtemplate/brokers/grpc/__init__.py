"""Client of RocketMQ 5's proxy: the implementation of `Broker` over gRPC."""
