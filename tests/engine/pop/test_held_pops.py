"""A pop that begins to wait while its messages become deliverable."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from mqtemplate.engine.pop.holds import HeldPop, HeldPops, HoldKey
from mqtemplate.engine.pop.requests import PopRequest
from tests.engine.pop.consumer import GROUP, TOPIC, Shop
from tests.waiting import eventually

KEY = HoldKey(GROUP, TOPIC)


class _WatchedLock:
    """A lock that tells who has it, and who waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.owner: int | None = None
        self.asked: set[int | None] = set()

    def __enter__(self) -> None:
        self.asked.add(threading.get_ident())
        self._lock.acquire()
        self.owner = threading.get_ident()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.owner = None
        self._lock.release()


class _Held(dict[HoldKey, Any]):
    """The pops that wait. When it is asked for the first time, another thread adds one."""

    def __init__(self, add: threading.Thread, lock: _WatchedLock) -> None:
        super().__init__()
        self._add: threading.Thread | None = add
        self._lock = lock

    def __contains__(self, key: object) -> bool:
        found = super().__contains__(key)
        thread, self._add = self._add, None
        if thread is not None:
            thread.start()
            own = threading.get_ident()
            eventually(
                lambda: not thread.is_alive() or (self._lock.owner == own and thread.ident in self._lock.asked),
                "the pop is added, or waits for the lock",
            )
        return found


def test_a_change_at_the_moment_in_which_a_pop_begins_to_wait_is_noted_for_it() -> None:
    """The pop found nothing, the message became deliverable, and the pop waited for the next change."""
    shop = Shop()
    try:
        holds = HeldPops(shop.broker.store, 8)
        held = HeldPop(holds, PopRequest(group=GROUP, topic=TOPIC), 5_000, lambda result: None)
        arrivals = holds.watch(KEY)
        lock = _WatchedLock()
        add = threading.Thread(target=holds.add, args=(held, arrivals), daemon=True)
        holds._lock, holds._held = lock, _Held(add, lock)  # type: ignore[assignment]

        holds.changed(KEY)

        add.join()
        assert holds.take_ready() == [KEY]
    finally:
        shop.broker.close()
