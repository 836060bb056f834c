"""Timers: RocketMQ's timing wheel and timer log."""
