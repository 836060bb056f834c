"""A waiting room in memory, and one in a folder that a test may close, kill and open again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.clock import VirtualClock
from tests.delay.waiting_room import WaitingRoom

OpenRoom = Callable[..., WaitingRoom]


@pytest.fixture
def room() -> Iterator[WaitingRoom]:
    room = WaitingRoom()
    yield room
    room.close()


@pytest.fixture
def open_room(tmp_path: Path) -> Iterator[OpenRoom]:
    """Open the folder again and again, at the time the last one left; the last one is closed at the end."""
    clock = VirtualClock()
    rooms: list[WaitingRoom] = []

    def open_(**changes: Any) -> WaitingRoom:
        rooms.append(WaitingRoom(tmp_path, **({"clock": clock} | changes)))
        return rooms[-1]

    yield open_
    rooms[-1].close()
