"""RocketMQ's index files: messages by key."""
