"""An archive of Spark's loaded classes, which lets the JVM start faster.

``python -m mqtemplate.spark`` makes it once, in half a minute, in the user's cache folder (some 160 MB);
`session` uses it from then on. It is valid for one Java and one set of jars, so its name is made of both.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from mqtemplate.spark.jvm.gateway import class_path
from mqtemplate.spark.jvm.java import Java

QUIET = "-Xlog:cds=off"
"""The JVM would name each class that cannot be archived."""


def archive_path(java: Java) -> Path:
    """Where the archive for this Java and this PySpark is, or would be."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jars = [f"{jar} {jar.stat().st_size}" for jar in map(Path, class_path()) if jar.is_file()]
    release = (java.executable.resolve().parents[1] / "release", java.executable.resolve())
    told = next(path.read_bytes() if path.name == "release" else bytes(path) for path in release if path.is_file())
    key = hashlib.sha256("\n".join(jars).encode() + told).hexdigest()[:16]
    return cache / "mqtemplate" / f"spark-classes-{key}.jsa"


def archive_flags(java: Java) -> list[str]:
    """The JVM flags that use the archive; none if it was not made."""
    path = archive_path(java)
    return [f"-XX:SharedArchiveFile={path}", QUIET] if path.is_file() else []
