"""A PostgreSQL server on loopback, started for the tests with Debian's packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.peer.rocketmq import free_port
from tests.waiting import eventually

_DEBIAN = Path("/usr/lib/postgresql")


def binaries() -> Path | None:
    """Return the directory of the newest server that is installed; None without one."""
    found = sorted(_DEBIAN.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if found:
        return found[-1].parent
    initdb = shutil.which("initdb")
    return None if initdb is None else Path(initdb).parent


@contextmanager
def postgres_server() -> Iterator[str]:
    """Start a server in a new directory, and yield its URL for SQLAlchemy with psycopg. It is stopped at the end.

    The server refuses to run as root; then it runs as the user ``postgres``, whom Debian's package creates.
    """
    programs = binaries()
    assert programs is not None
    as_user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory(prefix="postgres-", ignore_cleanup_errors=True) as folder:
        if as_user:
            shutil.chown(folder, "postgres")
        data, port = f"{folder}/data", free_port()
        initdb = [*as_user, str(programs / "initdb"), "-D", data, "-U", "postgres", "--auth=trust", "--no-sync"]
        subprocess.run(initdb, check=True, capture_output=True, cwd="/")
        options = ["-h", "127.0.0.1", "-p", str(port), "-c", f"unix_socket_directories={folder}"]
        server = subprocess.Popen(
            [*as_user, str(programs / "postgres"), "-D", data, *options],
            cwd="/",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        is_ready = [str(programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(port)]
        try:
            eventually(lambda: subprocess.run(is_ready, check=False).returncode == 0, "PostgreSQL is ready")
            yield f"postgresql+psycopg://postgres@127.0.0.1:{port}/postgres"
        finally:
            subprocess.run(
                [*as_user, str(programs / "pg_ctl"), "-D", data, "-m", "fast", "-s", "stop"], check=False, cwd="/"
            )
            server.wait(30)
