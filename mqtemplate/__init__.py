"""RocketMQ's delayed messages for Python."""

from __future__ import annotations

__all__: list[str] = []
