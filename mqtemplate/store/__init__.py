"""The storage engine: commit log, consume queues, index, recovery and retention, in RocketMQ's files.

Names are imported when they are used: a reader of the files needs the byte layouts only.
"""

from typing import TYPE_CHECKING

from mqtemplate.exports import late_import

if TYPE_CHECKING:
    from mqtemplate.record.appends import PutResult
    from mqtemplate.store.checkpoint import LogFollower
    from mqtemplate.store.cleaning import CleaningService, KeptMessages
    from mqtemplate.store.consume_queue import ConsumeQueue
    from mqtemplate.store.files.folder_store_files import FolderStoreFiles
    from mqtemplate.store.files.mapped_files import MappedFile, MappedFileQueue
    from mqtemplate.store.files.store_files import MemoryStoreFiles, StoreFiles
    from mqtemplate.store.index_service import IndexService
    from mqtemplate.store.message_store import MessageStore
    from mqtemplate.store.settings import FlushDiskType, StoreSettings
    from mqtemplate.store.tables import ConsumerOffsets, TopicTable

__all__ = [
    "CleaningService",
    "ConsumeQueue",
    "ConsumerOffsets",
    "FlushDiskType",
    "FolderStoreFiles",
    "IndexService",
    "KeptMessages",
    "LogFollower",
    "MappedFile",
    "MappedFileQueue",
    "MemoryStoreFiles",
    "MessageStore",
    "PutResult",
    "StoreFiles",
    "StoreSettings",
    "TopicTable",
]

__getattr__ = late_import(
    __name__,
    {
        "LogFollower": "mqtemplate.store.checkpoint",
        "CleaningService": "mqtemplate.store.cleaning",
        "KeptMessages": "mqtemplate.store.cleaning",
        "PutResult": "mqtemplate.store.commit_log",
        "ConsumeQueue": "mqtemplate.store.consume_queue",
        "ConsumerOffsets": "mqtemplate.store.tables",
        "FolderStoreFiles": "mqtemplate.store.files.folder_store_files",
        "MappedFile": "mqtemplate.store.files.mapped_files",
        "MappedFileQueue": "mqtemplate.store.files.mapped_files",
        "MemoryStoreFiles": "mqtemplate.store.files.store_files",
        "StoreFiles": "mqtemplate.store.files.store_files",
        "IndexService": "mqtemplate.store.index_service",
        "MessageStore": "mqtemplate.store.message_store",
        "FlushDiskType": "mqtemplate.store.settings",
        "StoreSettings": "mqtemplate.store.settings",
        "TopicTable": "mqtemplate.store.tables",
    },
)
