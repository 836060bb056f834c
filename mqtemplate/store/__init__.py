"""The storage engine: commit log, consume queues, index, recovery and retention, in RocketMQ's files."""

from mqtemplate.store.checkpoint import LogFollower
from mqtemplate.store.cleaning import CleaningService, PendingMessages
from mqtemplate.store.commit_log import PutResult
from mqtemplate.store.consume_queue import ConsumeQueue
from mqtemplate.store.consumer_offsets import ConsumerOffsets
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.files.mapped_file import MappedFile
from mqtemplate.store.files.mapped_file_queue import MappedFileQueue
from mqtemplate.store.files.store_files import MemoryStoreFiles, StoreFiles
from mqtemplate.store.index.index_service import IndexService
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.settings import FlushDiskType, StoreSettings
from mqtemplate.store.topics import TopicTable

__all__ = [
    "CleaningService",
    "ConsumeQueue",
    "ConsumerOffsets",
    "FlushDiskType",
    "FolderStoreFiles",
    "IndexService",
    "LogFollower",
    "MappedFile",
    "MappedFileQueue",
    "MemoryStoreFiles",
    "MessageStore",
    "PendingMessages",
    "PutResult",
    "StoreFiles",
    "StoreSettings",
    "TopicTable",
]
