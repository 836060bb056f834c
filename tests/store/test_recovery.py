"""What a start finds after a stop that nobody planned."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from mqtemplate.clock import VirtualClock
from mqtemplate.record import StoredRecord
from mqtemplate.store import FolderHome, MessageStore
from tests.store.small_store import OpenStore, bodies, draft, kill, small


def test_after_a_kill_everything_is_there_and_goes_on(open_store: OpenStore) -> None:
    store = open_store()
    for number in range(30):
        store.put(draft(bytes(300) + str(number).encode(), queue_id=number % 3))
    kill(store)

    again = open_store()

    assert [len(bodies(again, queue_id=queue_id)) for queue_id in range(3)] == [10, 10, 10]
    assert again.put(draft(b"next", queue_id=1)).queue_offset == 10


def test_a_log_cut_at_any_byte_keeps_what_was_whole(tmp_path: Path) -> None:
    """Cut the last file at every byte: each record that was whole is still there, in order, and writing goes on.

    A process that dies while it appends has not written the unit yet, so no queue knows the record.
    """
    source = tmp_path / "source"
    store = MessageStore(FolderHome(source), small(mapped_file_size_commit_log=600), VirtualClock())
    store.load()
    written = [b"first" * 60, b"second" * 20, b"", b"fourth"]
    puts = [store.put(draft(body)) for body in written]
    kill(store)
    last = max((source / "commitlog").iterdir())
    start = int(last.name)
    data = last.read_bytes()
    assert puts[-1].physical_offset > start > puts[0].physical_offset

    for cut in range(puts[-1].end - start + 1):
        folder = tmp_path / "cut"
        shutil.copytree(source, folder)
        (folder / "commitlog" / last.name).write_bytes(data[:cut].ljust(600, b"\0"))
        shutil.rmtree(folder / "consumequeue")

        again = MessageStore(FolderHome(folder), small(mapped_file_size_commit_log=600), VirtualClock())
        again.load()

        whole = [body for body, put in zip(written, puts, strict=True) if put.end <= start + cut]
        assert bodies(again) == whole
        assert again.put(draft(b"next")).queue_offset == len(whole)
        again.close()
        shutil.rmtree(folder)


def test_a_torn_tail_is_logged_with_file_and_offset_and_zeroed(open_store: OpenStore, tmp_path: Path) -> None:
    """Left as they are, the torn bytes could come alive behind a later record that ends just before them."""
    store = open_store()
    first, torn = store.put(draft(b"whole")), store.put(draft(b"torn" * 100))
    kill(store)
    file = tmp_path / "commitlog" / f"{0:020d}"
    data = bytearray(file.read_bytes())
    data[torn.end - 200 : torn.end] = bytes(200)
    file.write_bytes(data)
    shutil.rmtree(tmp_path / "consumequeue")

    with capture_logs() as logs:
        open_store()

    cut = next(line for line in logs if line["event"] == "store.torn_tail_cut")
    assert (cut["file"], cut["physical_offset"]) == (file.name, first.end)
    assert not any(file.read_bytes()[first.end :])


def test_consume_queues_that_are_gone_are_rebuilt(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    for number in range(30):
        store.put(draft(bytes(300) + str(number).encode(), queue_id=number % 2))
    store.close()
    shutil.rmtree(tmp_path / "consumequeue")

    again = open_store()
    again.put(draft(b"a record behind the checkpoint shows the gap"))
    kill(again)
    third = open_store()

    assert [body[300:] for body in bodies(third, queue_id=1)] == [str(number).encode() for number in range(1, 30, 2)]


def test_a_preallocated_file_that_was_never_used_is_no_harm(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    store.put(draft(b"x"))
    kill(store)
    (tmp_path / "commitlog" / f"{4096:020d}").write_bytes(bytes(4096))

    assert bodies(open_store()) == [b"x"]


class Follower:
    """Remembers the records it was shown."""

    def __init__(self, persisted: int | None = None, wanted: int | None = None) -> None:
        self.seen: list[bytes] = []
        self._persisted = persisted
        self._wanted = wanted

    def replay_from(self) -> int | None:
        return self._wanted

    def replay(self, record: StoredRecord) -> None:
        self.seen.append(record.body)

    def persist(self) -> int | None:
        return self._persisted


@pytest.mark.parametrize(("wanted", "shown"), [(None, [b"c"]), (0, [b"a", b"b", b"c"])])
def test_followers_see_the_log_from_the_checkpoint_or_from_where_they_ask(
    tmp_path: Path, wanted: int | None, shown: list[bytes]
) -> None:
    store = MessageStore(FolderHome(tmp_path), small(), VirtualClock())
    store.load()
    store.put(draft(b"a"))
    store.put(draft(b"b"))
    store.take_checkpoint()
    store.put(draft(b"c"))
    kill(store)
    follower = Follower(wanted=wanted)

    again = MessageStore(FolderHome(tmp_path), small(), VirtualClock())
    again.load([follower])
    again.close()

    assert follower.seen == shown


def test_the_checkpoint_waits_for_the_follower_that_lags_behind(tmp_path: Path) -> None:
    store = MessageStore(FolderHome(tmp_path), small(), VirtualClock())
    store.load([Follower(persisted=0)])
    store.put(draft(b"a"))
    store.take_checkpoint()
    kill(store)
    follower = Follower()

    again = MessageStore(FolderHome(tmp_path), small(), VirtualClock())
    again.load([follower])
    again.close()

    assert follower.seen == [b"a"]


@given(data=st.data())
def test_any_mix_of_puts_closes_and_kills_loses_nothing(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("store")
    model: dict[int, list[bytes]] = {0: [], 1: []}
    steps = data.draw(
        st.lists(
            st.one_of(
                st.tuples(st.integers(0, 1), st.binary(max_size=700)), st.sampled_from(["close", "kill", "checkpoint"])
            ),
            max_size=25,
        )
    )
    store = MessageStore(FolderHome(folder), small(), VirtualClock())
    store.load()
    for step in steps:
        if step == "checkpoint":
            store.take_checkpoint()
        elif isinstance(step, str):
            kill(store) if step == "kill" else store.close()
            store = MessageStore(FolderHome(folder), small(), VirtualClock())
            store.load()
        else:
            queue_id, body = step
            assert store.put(draft(body, queue_id=queue_id)).queue_offset == len(model[queue_id])
            model[queue_id].append(body)
        assert {queue_id: bodies(store, queue_id=queue_id) for queue_id in model} == model
    store.close()
    shutil.rmtree(folder)
