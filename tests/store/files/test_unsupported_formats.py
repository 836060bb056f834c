"""Formats that RocketMQ can write and mqtemplate cannot read are refused with a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate.errors import StoreFormatError
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.files.store_files import refuse_unsupported_formats


@pytest.mark.parametrize(
    ("file", "error"),
    [
        (
            "consumequeue/CURRENT",
            r"in RocksDB \(consumequeue/CURRENT.*storeType.*move consumequeue and the file checkpoint",
        ),
        (
            "consumequeue_rocksdb/CURRENT",
            r"move consumequeue_rocksdb and the file checkpoint away.*rebuilt from the commit",
        ),
        (
            "consumequeue_ext/orders/0/00000000000000000000",
            r"extension \(consumequeue_ext/orders/0/.*enableConsumeQueueExt.*move consumequeue and consumequeue_ext",
        ),
        (
            "batchconsumequeue/orders/0/00000000000000000000",
            r"in batches \(batchconsumequeue/orders/0/.*queue.type BatchCQ.*open it with RocketMQ",
        ),
    ],
)
def test_an_unsupported_format_is_refused_with_a_way_out(tmp_path: Path, file: str, error: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_bytes(b"x")

    with pytest.raises(StoreFormatError, match=error):
        refuse_unsupported_formats(FolderStoreFiles(tmp_path))


def test_folders_without_files_are_accepted(tmp_path: Path) -> None:
    """RocketMQ creates some of them whatever its options are."""
    for folder in ("consumequeue/orders/0", "consumequeue_ext/orders", "batchconsumequeue"):
        (tmp_path / folder).mkdir(parents=True)

    refuse_unsupported_formats(FolderStoreFiles(tmp_path))
