"""The engine: files and offsets."""

from mqtemplate.store.checkpoint import LogFollower
from mqtemplate.store.cleaning import CleaningService
from mqtemplate.store.consume_queue import ConsumeQueue
from mqtemplate.store.consumer_offsets import ConsumerOffsets
from mqtemplate.store.files.store_files import FolderHome, Home, MemoryHome
from mqtemplate.store.index.index_service import IndexService
from mqtemplate.store.files.mapped_file import MappedFile
from mqtemplate.store.files.mapped_file_queue import MappedFileQueue
from mqtemplate.store.message_store import MessageStore, PutResult
from mqtemplate.store.settings import FlushDiskType, StoreSettings
from mqtemplate.store.topics import TopicTable

__all__ = [
    "CleaningService",
    "ConsumeQueue",
    "ConsumerOffsets",
    "FlushDiskType",
    "FolderHome",
    "Home",
    "IndexService",
    "LogFollower",
    "MappedFile",
    "MappedFileQueue",
    "MemoryHome",
    "MessageStore",
    "PutResult",
    "StoreSettings",
    "TopicTable",
]
