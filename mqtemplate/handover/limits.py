"""Settings of the mover, and the delays that a new broker can keep: which messages may move now, and how they are sent.

A broker with timers keeps any delay up to its longest, and delivers no message early; a message that is due later stays
in the old broker until it comes into the range. RocketMQ 5 has slots of a second, and delivers up to that late.

A broker without timers, as RocketMQ 4.9, has delay levels only: it delivers a message when the delay of its level has
passed. So a message fits for a moment before each level, and would be delivered early before that moment. It moves if
that is early by `MoverSettings.max_early_ms` at most; else it stays, and the old broker releases it on time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mqtemplate.broker.hand_over import DelayLimits
from mqtemplate.message import Property

_MARGIN_MS = 60_000
"""The clocks of two machines differ, and a send takes time: stay this much below the longest delay."""
_SEND_MS = 100
"""Time that a send takes: a message that would have to be sent within it is not taken for that level any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoverSettings:
    """Settings of the mover.

    Attributes:
        rate: Most messages in a second.
        max_early_ms: A new broker without timers may deliver messages early by this much. 0: it gets none.
        lead_ms: A message that is due sooner stays, and the old broker releases it.
        lease_ms: Time after which another process may take over, if this one does not renew its lock.
        busy_share: Most of the time that the mover works. In the rest the sends of the application have the processor,
            the disk and the connection for themselves. 1 for an application that is stopped.
        settle_ms: Time after a send without an answer, or after the start, until a message that the new broker does not
            have is sent again.
        topics: Only messages for these topics; None for all.
        with_retries: Retries too: for an application that is stopped.
    """

    rate: int = 1_000
    max_early_ms: int = 0
    lead_ms: int = 5_000
    lease_ms: int = 15_000
    busy_share: float = 0.5
    settle_ms: int = 10_000
    topics: frozenset[str] | None = None
    with_retries: bool = False


def movable_times(limits: DelayLimits, now_ms: int, settings: MoverSettings) -> list[tuple[int, int]]:
    """Return the spans of deliver times (epoch ms) of the messages that may move now, without their ends, in order."""
    first_ms = now_ms + settings.lead_ms
    if limits.max_delay_ms:
        margin_ms = min(_MARGIN_MS, limits.max_delay_ms // 10)
        return [(first_ms, now_ms + limits.max_delay_ms - margin_ms)]
    early_ms = settings.max_early_ms
    spans: list[tuple[int, int]] = []
    for delay_ms in sorted(limits.levels_ms) if early_ms else ():
        start_ms = max(first_ms, now_ms + delay_ms + min(_SEND_MS, early_ms // 2))
        end_ms = now_ms + delay_ms + early_ms + 1
        if spans and start_ms <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end_ms, spans[-1][1])
        elif start_ms < end_ms:
            spans.append((start_ms, end_ms))
    return spans


def delay_properties(
    limits: DelayLimits, deliver_ms: int, now_ms: int, settings: MoverSettings
) -> Mapping[str, str] | None:
    """Return the delay of a message that is sent now; None if the new broker would deliver it late, or too early."""
    if limits.max_delay_ms:
        return {Property.TIMER_DELIVER_MS: str(deliver_ms)}
    left_ms = deliver_ms - now_ms
    levels = [
        (delay_ms, level)
        for level, delay_ms in enumerate(limits.levels_ms, 1)
        if left_ms - settings.max_early_ms <= delay_ms <= left_ms
    ]
    return {Property.DELAY: str(max(levels)[1])} if levels else None


def free_time(limits: DelayLimits, deliver_ms: int, recalled: Collection[int]) -> int:
    """Return *deliver_ms*, or the first later time in a slot of the new broker without any of the times *recalled*."""
    precision_ms = limits.precision_ms
    taken = {(time_ms - 1) // precision_ms for time_ms in recalled}  # a time on the border is in the slot before it
    slot = (deliver_ms - 1) // precision_ms
    if slot not in taken:
        return deliver_ms
    while slot in taken:
        slot += 1
    return slot * precision_ms + 1
