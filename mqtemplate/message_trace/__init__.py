"""RocketMQ's message trace: who sent and who consumed a message, as messages of a trace topic."""
