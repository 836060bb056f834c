"""Programs with RocketMQ's gRPC clients: how they are built and run, and which cases they have.

A program is called with ``ENDPOINT PREFIX CASES plain|tls [ACCESS_KEY SECRET_KEY]...``. It runs the cases, named with
commas between them, one after the other, and prints an object of JSON for each: ``case``, and what the case returns, or
``error`` if it failed. A case uses the topic ``PREFIXcase`` and the group ``PREFIXcase-group``, and a simple consumer
that acknowledges each message if nothing else is said:

- ``normal``: send one message and receive it. ``sent`` (message ID), ``received`` (id, body, tag, keys, properties,
  attempt).
- ``fifo``: send ``a 0``, ``b 0``, ``a 1``, ... with the message groups ``a`` and ``b``; a push consumer, or a simple
  one if the client has no other, receives them. ``received`` (bodies in their order).
- ``delay``: send a message for a later time. ``deliver_ms``, ``received_ms``, ``body``.
- ``transaction``: ``committed`` is committed, ``rolled back`` is rolled back, and ``checked`` is left open, until the
  checker commits it. ``received`` (sorted bodies), ``checked`` (bodies).
- ``simple``: receive three messages, invisible for ten seconds. Acknowledge ``acked``, make ``changed`` visible after
  15 more seconds (a client that cannot lets it expire, too), and let ``expires`` expire; acknowledge both at their
  second delivery. ``deliveries`` (body, attempt, after_ms since the start of the call that first received the body).
- ``push``: a push consumer always fails for ``fails always`` and at the first delivery for ``fails once``, not for
  ``ok``. ``deliveries`` as above. Its group has three attempts.
- ``filter``: consumers of the groups ``PREFIXfilter-tags-group`` and ``PREFIXfilter-sql-group`` select the tags
  ``paid || late`` and ``amount > 10`` of the messages ``b`` (tag ``open``, property ``amount`` 50), ``a`` (``paid``, 5)
  and ``c`` (``late``, 500). ``tags`` and ``sql`` (sorted bodies).
- ``recall``: send the delayed messages ``recalled`` and ``kept``, and recall the first. ``sent`` and ``recalled`` (its
  message ID), ``received`` (bodies).
- ``rights``: for each account of the arguments, send a message and receive one. ``outcomes`` (``send`` and ``receive``:
  "ok", or the error).
- ``offer`` and ``take``, of the Java program only: send ``plain`` (tag ``paid``, keys ``k-1`` and ``k-2``, properties
  ``color`` and ``größe``), ``large`` (a body of 120,000 bytes), ``ordered`` (message group ``g-1``) and ``delayed`` to
  the topic ``PREFIXshared``; receive four messages of it. ``sent`` (message IDs), ``deliver_ms``; ``received`` (id,
  body, tag, keys, properties, group, received_ms).

Calls of ``receive`` that failed are repeated; ``receive_errors`` has their texts.

The program ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peer import python_client
from bench.peer.fetch import fetch
from bench.peer.jvm import command_line, scratch_home, unavailable_reason
from mqtemplate.remoting import Credentials
from tests.conformance.client_programs import (
    BUILT,
    ClientProgramError,
    ClientUnavailableError,
    build_client,
    built,
    fetch_client,
    require,
)
from tests.conformance.grpc_clients.servers import OWN, Administrator, GrpcServer

CASES = ("normal", "fifo", "delay", "transaction", "simple", "push", "filter", "recall")
"""Cases that run one after the other in one run of a program, without an account and TLS."""
_FOLDER = Path(__file__).parent
_TIMEOUT_S = 900
_PROTOCOL_LACKS = {"level": "the protocol has times only (definition.proto: SystemProperties.delivery_timestamp)"}
_TOPIC_TYPES = {"fifo": "FIFO", "delay": "DELAY", "recall": "DELAY", "transaction": "TRANSACTION"}


@dataclass(frozen=True, slots=True)
class GrpcClient:
    """A client and its program.

    Attributes:
        package: Name of the client in the registry of its language, with its version.
        command: Build the program, and return its command line without arguments.
        lacks: Cell of the matrix -> what the client lacks, with the line of its sources that shows it.
        fails: Cell -> reason why the client fails in it with RocketMQ's proxy.
        fails_here: Cell -> reason why the client fails in it with this project's server, too.
    """

    package: str
    command: Callable[[], Sequence[str]]
    lacks: Mapping[str, str] = field(default_factory=dict)
    fails: Mapping[str, str] = field(default_factory=dict)
    fails_here: Mapping[str, str] = field(default_factory=dict)

    def missing(self, cell: str) -> str:
        """Return what the client lacks for a cell, or an empty text."""
        return _PROTOCOL_LACKS.get(cell) or self.lacks.get(cell, "")

    def failure(self, cell: str, server_name: str) -> str:
        """Return the reason why the client fails in a cell with a server, or an empty text."""
        return (self.fails_here if server_name == OWN else self.fails).get(cell, "")

    def cases(self) -> list[str]:
        """Return the cases of its program."""
        return [case for case in CASES if case not in self.lacks]


# --- clients -------------------------------------------------------------------------------------------


def python_program() -> Sequence[str]:
    """Install RocketMQ's Python client, and return the command of its program."""
    if reason := python_client.fetch_client():
        raise ClientUnavailableError(reason)
    return [str(python_client.PYTHON), str(_FOLDER / "python" / "program.py")]


def java_program() -> Sequence[str]:
    """Fetch RocketMQ's Java client, and return the command of its program."""
    if reason := unavailable_reason() or fetch("grpc-client", "RocketMQ's gRPC client for Java"):
        raise ClientUnavailableError(f"{reason} (Debian: apt-get install openjdk-17-jdk-headless maven)")
    # The program runs in its own folder.
    return command_line("grpc", Path(), "Guarded", "Cases", heap_mib=128)


def go_program() -> Sequence[str]:
    """Build the program with RocketMQ's gRPC client for Go."""
    require("go", "1.25", "Go 1.25 or newer (https://go.dev/dl)", "version")

    def build(sources: Path, folder: Path) -> None:
        fetch_client(["go", "mod", "download"], sources)
        build_client(["go", "build", "-buildvcs=false", "-mod=readonly", "-o", f"{folder}/program", "."], sources)

    return [str(built("grpc-go", build, _FOLDER / "go") / "program")]


def node_program() -> Sequence[str]:
    """Install RocketMQ's gRPC client for Node.js, and return the command of its program."""
    require("node", "16.19", "Node.js 16.19 or newer with npm (Debian: apt-get install nodejs npm)", "--version")
    require("npm", "8.0", "npm 8 or newer (Debian: apt-get install npm)", "--version")

    def build(sources: Path, folder: Path) -> None:
        shutil.copytree(sources, folder, dirs_exist_ok=True)
        fetch_client(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], folder)

    return ["node", str(built("grpc-node", build, _FOLDER / "node") / "program.js")]


def rust_program() -> Sequence[str]:
    """Build the program with RocketMQ's gRPC client for Rust."""
    require("cargo", "1.85", "Rust 1.85 or newer (https://rustup.rs)", "--version")

    def build(sources: Path, folder: Path) -> None:
        fetch_client(["cargo", "fetch", "--locked"], sources)
        target = BUILT / "target-grpc-rust"
        build_client(["cargo", "build", "--locked", "--target-dir", str(target)], sources)
        shutil.copy2(target / "debug" / "conformance-grpc-rust", folder / "program")

    return [str(built("grpc-rust", build, _FOLDER / "rust") / "program")]


CLIENTS = {
    "java": GrpcClient("org.apache.rocketmq:rocketmq-client-java 5.2.0", java_program),
    "go": GrpcClient(
        "github.com/apache/rocketmq-clients/golang/v5 v5.1.3",
        go_program,
        lacks={"recall": "its Producer has no recall (golang/producer.go:34)"},
    ),
    "node": GrpcClient("rocketmq-client-nodejs 1.0.8", node_program),
    "python": GrpcClient(python_client.CLIENT, python_program),
    "rust": GrpcClient(
        "rocketmq 5.0.0",
        rust_program,
        lacks={
            "change": "its SimpleConsumer has `receive`, `receive_with` and `ack` only (src/simple_consumer.rs:117)",
            "push": "it exports Producer and SimpleConsumer only (src/lib.rs:123)",
            "recall": "its Producer sends only (src/producer.rs:230)",
            "tls": "it leaves out the configuration of TLS (src/session.rs:208)",
        },
    ),
}


# --- runs ----------------------------------------------------------------------------------------------


def create_topics(server: GrpcServer, prefix: str, cases: Sequence[str]) -> None:
    """Create the topics and groups of cases."""
    with Administrator(server) as administrator:
        for case in cases:
            administrator.create_topic(prefix + case, _TOPIC_TYPES.get(case, ""))
            groups = ["filter-tags", "filter-sql"] if case == "filter" else [case]
            for group in groups:
                retries = 2 if case == "push" else 16
                administrator.create_group(f"{prefix}{group}-group", retries=retries, ordered=case == "fifo")


def run_cases(
    name: str,
    server: GrpcServer,
    prefix: str,
    cases: Sequence[str],
    *,
    tls: bool = False,
    accounts: Sequence[Credentials] = (),
) -> dict[str, dict[str, Any]]:
    """Run cases of a client of `CLIENTS`, and return what each printed.

    Raises:
        ClientUnavailableError: The toolchain is missing.
        ClientProgramError: The program could not be built, or did not print a case.
    """
    keys = [key for account in accounts for key in (account.access_key, account.secret_key)]
    transport = "tls" if tls else "plain"
    command = [*CLIENTS[name].command(), server.endpoint, prefix, ",".join(cases), transport, *keys]
    with scratch_home(f"grpc-{name}") as home:
        environment = os.environ | {"HOME": str(home)}  # clients write logs there
        if tls:
            environment["GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"] = str(server.authority)
        output, errors = home / "program.out", home / "errors.out"
        with output.open("wb") as written, errors.open("wb") as failures:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=written, stderr=failures, cwd=home, env=environment
            )
        try:
            process.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass  # It has not printed all cases then.
        finally:
            process.kill()
            process.communicate()
        printed, tail = (path.read_text(errors="replace").splitlines() for path in (output, errors))
    found = [json.loads(line) for line in printed if line.startswith("{")]  # a client prints there, too
    if [each.get("case") for each in found] != list(cases):
        lines = "\n".join(printed[-20:] + tail[-40:])
        raise ClientProgramError(f"{name} ended with {process.returncode} after {found}:\n{lines}")
    return {each.pop("case"): each for each in found}
