"""The storage engine: commit log, consume queues, index, recovery and retention, in RocketMQ's files."""
