"""Delay levels: RocketMQ's schedule service."""
