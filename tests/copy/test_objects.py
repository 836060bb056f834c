"""Places of copies: folders, object stores, and the texts of wrong ones; segments as bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mqtemplate.copy.catalogue import Catalogue, Moment, Segment, SegmentName, decode, encode
from mqtemplate.copy.objects import FolderObjects, ObjectStore, RemoteObjects, open_objects
from mqtemplate.errors import ConfigurationError, CopyError

SEGMENT = Segment(100, b"log" * 50, [Moment(5, 250, {"config/topics.json": b"{}", "config/gone.json": None})])


def folder(tmp_path: Path) -> ObjectStore:
    return FolderObjects(f"file://{tmp_path / 'copy'}")


def memory(tmp_path: Path) -> ObjectStore:
    store = pytest.importorskip("obstore.store", reason="the extra copy is not installed")
    return RemoteObjects("s3://bucket/shop", {}, store.MemoryStore())


@pytest.fixture(params=[folder, memory])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """Each kind of place."""
    place: Callable[[Path], ObjectStore] = request.param
    return place(tmp_path)


# --- places -------------------------------------------------------------------------------------


def test_objects_are_written_read_listed_and_deleted(objects: ObjectStore) -> None:
    objects.put("segments/00000001/b", b"22")
    objects.put("segments/00000001/a", b"1")
    objects.put("segments/00000001/a", b"333")
    objects.put("copy.json", b"{}")

    assert objects.get("segments/00000001/a") == b"333"
    assert list(objects.list("").items()) == [("copy.json", 2), ("segments/00000001/a", 3), ("segments/00000001/b", 2)]
    assert list(objects.list("segments/")) == ["segments/00000001/a", "segments/00000001/b"]
    assert objects.list("snapshots/") == {}

    objects.delete(["segments/00000001/a", "missing"])
    assert list(objects.list("segments/")) == ["segments/00000001/b"]


def test_of_two_processes_that_create_an_object_one_wins(objects: ObjectStore) -> None:
    """The same content counts as one's own: a request may be repeated after its response was lost."""
    assert objects.create("epochs/00000001.json", b"mine")
    assert not objects.create("epochs/00000001.json", b"theirs")
    assert objects.create("epochs/00000001.json", b"mine")
    assert objects.get("epochs/00000001.json") == b"mine"


def test_a_missing_object_is_named(objects: ObjectStore) -> None:
    with pytest.raises(CopyError, match=f"{objects.url}: segments/x is missing"):
        objects.get("segments/x")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CopyError, match=r"file://.*/file/copy: a: Not a directory"):
        FolderObjects(f"file://{tmp_path / 'file' / 'copy'}").put("a", b"")


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("/mnt/copy", r"'/mnt/copy' has no scheme; write file:///folder, s3://bucket/prefix"),
        ("ftp://host/copy", r"'ftp://host/copy' has the unknown scheme 'ftp'; write file:///folder"),
        ("file://mnt/copy", r"must name a folder by its whole path: file:///mnt/copy, three slashes"),
        ("file:///", r"must name a folder by its whole path"),
    ],
)
def test_a_wrong_place_is_refused_before_anything_is_sent(url: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        open_objects(url)


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(
        ConfigurationError, match=r"s3://bucket \(Amazon S3 .*\) needs the package obstore.*pip install"
    ):
        open_objects("s3://bucket")


def test_a_missing_compression_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigurationError, match=r"copies are compressed by zstd; install .*pip install"):
        encode(SEGMENT)


def test_an_option_of_another_library_is_refused() -> None:
    pytest.importorskip("obstore", reason="the extra copy is not installed")
    with pytest.raises(ConfigurationError, match="'endpoint' is not an option for s3://; they begin with 'aws_'"):
        open_objects("s3://bucket", {"endpoint": "http://127.0.0.1:9000"})
    with pytest.raises(ConfigurationError, match=r"or its options \(mqtemplate.copy.options\) are wrong"):
        open_objects("s3://bucket", {"aws_no_such_option": "1"})


# --- segments -----------------------------------------------------------------------------------


def test_a_segment_survives_its_bytes() -> None:
    assert decode("a", encode(SEGMENT)) == SEGMENT


def test_each_damaged_byte_of_a_segment_is_found() -> None:
    """Any byte that is changed, or any end that is cut off, is an error that names the object."""
    data = encode(SEGMENT)
    for at in range(len(data)):
        for damaged in (data[:at], data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]):
            with pytest.raises(CopyError, match="segments/x is damaged: .*restore to a moment before it"):
                decode("segments/x", damaged)


def test_a_merged_segment_hides_those_that_it_replaces(tmp_path: Path) -> None:
    """A process that is killed between the write and the deletions leaves both."""
    parts = [SegmentName(1, 0, 10, 5, 5, 1), SegmentName(1, 10, 10, 6, 6, 1), SegmentName(1, 10, 30, 7, 7, 1)]
    merged, following = SegmentName(1, 0, 30, 5, 7, 1), SegmentName(1, 30, 40, 8, 8, 1)
    names = {each.object: 1 for each in [*parts, merged, following]}

    assert Catalogue(folder(tmp_path), "", [], names).segments == [merged, following]


def test_a_place_without_a_copy_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        CopyError, match=r"has no copy \(copy.json is missing\); give the place that mqtemplate.copy.to"
    ):
        Catalogue.read(folder(tmp_path))
    folder(tmp_path).put("copy.json", b'{"format": 9}')
    with pytest.raises(CopyError, match="has a copy of format 9, and this version reads format 1"):
        Catalogue.read(folder(tmp_path))
