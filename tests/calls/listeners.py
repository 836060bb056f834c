"""Listeners of calls that a test makes itself."""

from __future__ import annotations

from mqtemplate.calls.handling import ListenerInfo
from mqtemplate.clock import Clock


def listener_info(listener_id: str, clock: Clock, *, is_batch: bool = False) -> ListenerInfo:
    """Return a listener of the group ``billing``."""
    return ListenerInfo(
        id=listener_id, group="billing", topics=("orders",), is_batch=is_batch, is_async=False, clock=clock,
        is_done=lambda _: True, resume=lambda: None,
    )  # fmt: skip
