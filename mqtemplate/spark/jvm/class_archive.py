"""Archive of Spark's loaded classes, with which the JVM starts faster.

``python -m mqtemplate.spark`` creates it in half a minute, in the user's cache folder (about 160 MB). Later sessions
use it. It is valid for one Java and one set of jars, so its name is a hash of both.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from mqtemplate.spark.jvm.gateway import class_path
from mqtemplate.spark.jvm.java import Java

QUIET = "-Xlog:cds=off"
"""Flag against one warning for each class that cannot be archived."""


def archive_path(java: Java) -> Path:
    """Return the path of the archive for this Java and this PySpark; the file may be missing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jars = [f"{jar} {jar.stat().st_size}" for jar in map(Path, class_path()) if jar.is_file()]
    release = (java.executable.resolve().parents[1] / "release", java.executable.resolve())
    version = next(path.read_bytes() if path.name == "release" else bytes(path) for path in release if path.is_file())
    key = hashlib.sha256("\n".join(jars).encode() + version).hexdigest()[:16]
    return cache / "mqtemplate" / f"spark-classes-{key}.jsa"


def archive_flags(java: Java) -> list[str]:
    """Return the JVM flags that use the archive; none if it is missing."""
    path = archive_path(java)
    return [f"-XX:SharedArchiveFile={path}", QUIET] if path.is_file() else []
