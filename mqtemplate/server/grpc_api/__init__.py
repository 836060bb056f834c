"""RocketMQ 5's gRPC protocol over the core of the server: the service ``apache.rocketmq.v2.MessagingService``."""
