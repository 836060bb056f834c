"""Apache Kafka 3.9 on loopback: one node in KRaft mode. `make setup` does not fetch its packages."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.peer.fetch import PACKAGES_FOLDER, fetch
from bench.peer.jvm import PeerError, PeerProcess
from bench.peer.rocketmq import free_port

_CLUSTER_ID = "4L6g3nShT-eMCtK--X86sw"


def fetch_kafka() -> str | None:
    """Fetch Kafka and Spark's connector for it if they are missing. Return the reason if that fails."""
    return fetch("kafka", "Apache Kafka 3.9") or fetch("kafka-spark", "Spark's connector for Kafka")


def connector_jars() -> list[str]:
    """Return the jars of Spark's connector for Kafka, without those that PySpark has."""
    folder = PACKAGES_FOLDER / "kafka-spark"
    return sorted(str(path) for pattern in ("*kafka*.jar", "commons-pool2*.jar") for path in folder.glob(pattern))


class Kafka:
    """A node that is broker and controller, in its own process.

    Args:
        folder: Folder of the log.
        partitions: Partitions of a topic that its first message creates.
    """

    def __init__(self, folder: Path, partitions: int) -> None:
        port, controller = free_port(), free_port()
        self.address = f"127.0.0.1:{port}"
        self._home = home = Path(tempfile.mkdtemp(prefix="kafka-"))
        settings = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "listeners": f"PLAINTEXT://{self.address},CONTROLLER://127.0.0.1:{controller}",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": folder.absolute(),
            "num.partitions": partitions,
            "offsets.topic.replication.factor": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
        }
        (home / "server.properties").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        self._run("kafka.tools.StorageTool", "format", "-t", _CLUSTER_ID, "-c", f"{home}/server.properties")
        command = [*self._java("1g"), "kafka.Kafka", f"{home}/server.properties"]
        self._process = PeerProcess("kafka", command, home)
        self._process.wait_for("Kafka Server started")

    def _java(self, heap: str) -> list[str]:
        return ["java", f"-Xmx{heap}", "-XX:+UseG1GC", "-cp", f"{PACKAGES_FOLDER}/kafka/*"]

    def _run(self, main: str, *arguments: str) -> None:
        command = [*self._java("256m"), main, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PeerError(f"{main} ended with {done.returncode}:\n{done.stdout}{done.stderr}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.stop()
        shutil.rmtree(self._home, ignore_errors=True)
