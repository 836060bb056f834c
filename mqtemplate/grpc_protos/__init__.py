"""Messages of RocketMQ's gRPC protocol, ``apache.rocketmq.v2``. Needs the extra ``grpc``."""
