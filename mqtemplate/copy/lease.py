"""The lease of a copied store: until when its broker may store messages, and when another one may follow it.
Signs of life of the followers, which grant nothing: they are there for operators.

The owner writes a sign of life, then looks for a newer epoch. If there is none, it may store messages for the lease,
counted from before it wrote the sign. A follower takes over when it has seen the same sign for longer than that: it
creates an epoch, and reads the sign again. Either it is the same, so that the owner finds the epoch after its next sign
and stores nothing more; or the owner was faster, and the follower waits once more. Only durations are compared, so the
clocks of the machines may differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from mqtemplate.broker import CopyFollower
from mqtemplate.clock import Clock, lease_time_ms
from mqtemplate.converters.readable import span_text
from mqtemplate.copy.catalogue import ALIVE_MS, Alive, read_json
from mqtemplate.copy.objects import ObjectStore
from mqtemplate.errors import CopyError
from mqtemplate.event_log import get_logger

_log = get_logger("mqtemplate.copy")

SIGN_OF_LIFE_MS = 20_000
_FOLLOWERS = "followers/"
_MAX_FOLLOWERS = 16
_FORGOTTEN_MS = 86_400_000

_MARGIN_MS = 1_000
_CLOCK_DRIFT = 0.01  # monotonic clocks of two machines differ by far less


class Lease:
    """The lease of the owner.

    Args:
        to: URL of the copy.
    """

    def __init__(self, clock: Clock, lease_ms: int, to: str) -> None:
        self._clock = clock
        self._to = to
        self.lease_ms = lease_ms
        self._end_ms: int | None = None
        self._lost: str | None = None

    def now_ms(self) -> int:
        """Return the time by which the lease is counted."""
        return lease_time_ms(self._clock)

    def renew(self, since_ms: int) -> None:
        """Note that no newer epoch was there after a sign of life.

        Args:
            since_ms: `now_ms` before the sign was written.
        """
        self._end_ms = since_ms + self.lease_ms

    def lose(self, reason: str) -> None:
        """End the lease for good."""
        self._lost = reason

    def refusal(self) -> str | None:
        """Return why nothing may be stored now; None while the lease lasts."""
        if self._lost is not None:
            return self._lost
        if self._end_ms is not None and self.now_ms() < self._end_ms:
            return None
        return (
            f"{self._to} has taken no sign of life of this broker for {span_text(self.lease_ms)} "
            "(mqtemplate.copy.lease), so a follower may have taken over; nothing is accepted or released until it "
            "takes one again"
        )


@dataclass(slots=True)
class OwnerWatch:
    """The signs of life of the owner that a follower has seen.

    Attributes:
        sign: The last sign of life.
        since_ms: `Clock.steady_ms` when it was seen first.
    """

    sign: Alive | None = None
    since_ms: int = 0

    def note(self, sign: Alive, steady_ms: int) -> None:
        """Note a sign of life that was read."""
        if sign != self.sign:
            self.sign, self.since_ms = sign, steady_ms

    def remaining_ms(self, clock: Clock) -> int:
        """Return the time until the owner cannot store messages any more; 0 if that is certain now.

        Without a lease nothing is certain but a clean end. Then a sign is as old as the wall clocks say.
        """
        sign = self.sign
        if sign is None or sign.is_closed:
            return 0
        if not sign.lease_ms:
            return max(sign.seen_ms + ALIVE_MS - clock.now_ms(), 0)
        lease_ms = int(sign.lease_ms * (1 + _CLOCK_DRIFT)) + _MARGIN_MS
        return max(self.since_ms + lease_ms - clock.steady_ms(), 0)


# --- followers ----------------------------------------------------------------------------------


def follower_object(host: str, folder: str) -> str:
    """Return the name of the object with the sign of life of a follower."""
    return f"{_FOLLOWERS}{hashlib.sha256(f'{host}:{folder}'.encode()).hexdigest()[:16]}.json"


def read_followers(objects: ObjectStore, now_ms: int) -> list[CopyFollower]:
    """Return the followers of a copy, sixteen at most. Delete signs that are older than a day.

    Raises:
        CopyError: The place does not answer.
    """
    names = list(objects.list(_FOLLOWERS))
    if len(names) > _MAX_FOLLOWERS:
        _log.debug("copy.followers_left_out", to=objects.url, followers=len(names), read=_MAX_FOLLOWERS)
    found = dict(_followers(objects, names[:_MAX_FOLLOWERS]))
    objects.delete([name for name, each in found.items() if each.seen_ms < now_ms - _FORGOTTEN_MS])
    return [each for each in found.values() if each.seen_ms >= now_ms - _FORGOTTEN_MS]


def _followers(objects: ObjectStore, names: list[str]) -> Iterator[tuple[str, CopyFollower]]:
    for name in names:
        try:
            sign = read_json(objects, name)
            host, pid, folder = str(sign["host"]), int(sign["pid"]), str(sign["folder"])
            seen_ms, copied_ms = int(sign["seen_ms"]), int(sign["copied_ms"])
            yield name, CopyFollower(host, pid, folder, seen_ms, copied_ms, sign["is_warm"] is True)
        except (CopyError, KeyError, TypeError, ValueError) as exc:  # it stopped a moment ago, or is newer
            _log.debug("copy.follower_unreadable", to=objects.url, object=name, reason=str(exc))
