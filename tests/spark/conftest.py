"""Store folders to read, and one Spark session for the whole run."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.message import HostAddress
from mqtemplate.server import BrokerServerSettings, LocalCluster
from mqtemplate.spark import LocalServer
from mqtemplate.spark.location.cluster_connection import close_connections

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOG_FILE_SIZE = 4_096
ANY_PORT = HostAddress("127.0.0.1", 0)
SECRET_KEY, SECRET_VALUE = "spark.hadoop.fs.s3a.secret.key", "s3cret = a:b#c!d \\ grüße\tand\nmore"
"""A setting of the session. Its value has the characters with a meaning in files of settings."""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """Broker that owns a folder. On its virtual clock, sent messages are in the files at once."""
    with EmbeddedBroker(tmp_path / "store", clock=VirtualClock()) as broker:
        yield broker


@pytest.fixture
def served(broker: EmbeddedBroker) -> Iterator[EmbeddedBroker]:
    """The broker, with a server for Spark's processes."""
    with LocalServer(broker):
        yield broker


Serve = Callable[..., LocalCluster]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Return a function that starts a server with a name server on loopback, which accepts other brokers."""
    with ExitStack() as running:

        def start(name: str = "broker-a", **options: Any) -> LocalCluster:
            settings = EmbeddedSettings(broker_name=name, listen_host=ANY_PORT)
            engine = EmbeddedBroker(tmp_path / name, settings, SystemClock())
            server = BrokerServerSettings(listen=ANY_PORT, broker_registration_enable=True)
            return running.enter_context(LocalCluster(engine, server, ANY_PORT, **options))

        yield start
        close_connections()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The session of the run. Its start takes seconds, and a small machine has no memory for two."""
    from mqtemplate.spark import session

    warehouse = tmp_path_factory.mktemp("warehouse")
    conf = {
        "spark.sql.warehouse.dir": str(warehouse),
        "spark.driver.extraJavaOptions": '-Dtest.password="s3cret \\"\\\\ #"',
        SECRET_KEY: SECRET_VALUE,
    }
    spark = session(master="local[2]", short_lived=True, **conf)
    yield spark
    spark.stop()


@dataclass(frozen=True, kw_only=True)
class ForeignRecord:
    """Record as RocketMQ writes it, packed by hand from the layout, without the check of our own broker."""

    body: bytes = b""
    properties: bytes = b""
    topic: bytes = b"orders"
    v2: bool = False
    born_host: bytes = bytes([10, 0, 0, 1, 0, 0, 0, 80])
    store_host: bytes = bytes([127, 0, 0, 1, 0, 0, 42, 159])
    sys_flag: int = 0
    flag: int = 0
    born_timestamp: int = 1_700_000_000_123
    store_timestamp: int = 1_700_000_000_456
    reconsume_times: int = 0

    def pack(self, physical_offset: int, queue_offset: int) -> bytes:
        sys_flag = (
            self.sys_flag | (0x10 if len(self.born_host) == 20 else 0) | (0x20 if len(self.store_host) == 20 else 0)
        )
        head = struct.pack(
            ">iiiqqiq",
            zlib.crc32(self.body) & 0x7FFF_FFFF,
            0,
            self.flag,
            queue_offset,
            physical_offset,
            sys_flag,
            self.born_timestamp,
        )
        back = struct.pack(">iqi", self.reconsume_times, 0, len(self.body)) + self.body
        topic = len(self.topic).to_bytes(2 if self.v2 else 1, "big") + self.topic
        store_timestamp = struct.pack(">q", self.store_timestamp)
        properties = struct.pack(">h", len(self.properties)) + self.properties
        rest = head + self.born_host + store_timestamp + self.store_host + back + topic + properties
        return struct.pack(">iI", 8 + len(rest), 0xDAA320AB if self.v2 else 0xDAA320A7) + rest


FolderWriter = Callable[..., Path]


@pytest.fixture(scope="session")
def write_foreign_folder() -> FolderWriter:
    """Return a function that writes commit log and one consume queue like RocketMQ, in small files."""

    def write(
        folder: Path, records: Sequence[ForeignRecord], *, log_file_size: int = LOG_FILE_SIZE, units_a_file: int = 100
    ) -> Path:
        log: dict[int, bytearray] = {}
        units, at = b"", 0
        for number, record in enumerate(records):
            size = len(record.pack(0, 0))
            if at % log_file_size + size + 8 > log_file_size:  # the rest of the file is a blank
                at += log_file_size - at % log_file_size
            start = at - at % log_file_size
            file = log.setdefault(start, bytearray(log_file_size))
            file[at - start : at - start + size] = record.pack(at, number)
            units += struct.pack(">qiq", at, size, 0)
            at += size
        (folder / "commitlog").mkdir(parents=True)
        for start, data in (log or {0: bytearray(log_file_size)}).items():
            (folder / "commitlog" / f"{start:020d}").write_bytes(data)
        queue = folder / "consumequeue" / "orders" / "0"
        queue.mkdir(parents=True)
        step = units_a_file * 20
        for start in range(0, len(units) + 1, step):
            (queue / f"{start:020d}").write_bytes(units[start : start + step].ljust(step, b"\0"))
        return folder

    return write


@pytest.fixture(scope="session")
def foreign_record() -> type[ForeignRecord]:
    return ForeignRecord
