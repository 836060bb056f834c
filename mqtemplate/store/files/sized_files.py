"""Opening a run of files in the size that the settings say."""

from __future__ import annotations

from collections import Counter

from mqtemplate.errors import StoreFormatError
from mqtemplate.store.files.mapped_file_queue import MappedFileQueue
from mqtemplate.store.files.store_files import StoreFiles


def open_files(
    store_files: StoreFiles, folder: str, file_size: int, setting: str, *, lasting: bool = True
) -> MappedFileQueue:
    """The mapped files in a folder.

    Args:
        setting: The key in the configuration that says how long they are.

    Raises:
        StoreFormatError: They have another length; or a name does not belong there, or one is missing.
    """
    try:
        return store_files.mapped_queue(folder, file_size, lasting=lasting)
    except StoreFormatError as exc:
        lengths = Counter(length for length in store_files.file_sizes(folder).values() if length)
        if not lengths or file_size in lengths:
            raise
        found = lengths.most_common(1)[0][0]
        raise StoreFormatError(
            f"the files in {folder} have {found} bytes, but {setting} is {file_size}; a folder keeps the sizes it was "
            f"made with, so set {setting} to {found}. If {file_size} is right, a file was cut: restore it"
            f"{'' if lasting else ', or delete the folder consumequeue, which is made again from the commit log'}"
        ) from exc
