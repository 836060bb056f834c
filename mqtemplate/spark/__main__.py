"""``python -m mqtemplate.spark``: make the archive of classes that lets sessions start faster."""

from __future__ import annotations

from mqtemplate.spark.jvm.archive_training import make_archive

__all__: list[str] = []

make_archive()
