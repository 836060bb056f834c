"""Text of a configuration file, whatever its format."""

from __future__ import annotations

from pathlib import Path

from mqtemplate.errors import ConfigurationError

_MAX_BYTES = 1 << 20


def read_text(file: Path, unreadable: str = "{file}: cannot be read: {reason}") -> str:
    """Return the text of a file.

    Args:
        unreadable: Error text for a file that the system does not read.

    Raises:
        ConfigurationError: The file cannot be read, is too long, or is not UTF-8.
    """
    try:
        size = file.stat().st_size
        if size > _MAX_BYTES:
            raise ConfigurationError(f"{file.name}: has {size:,} bytes, allowed are {_MAX_BYTES:,}; shorten it")
        return file.read_bytes().decode("utf-8-sig")  # editors of Windows write a byte order mark
    except UnicodeDecodeError as exc:
        raise ConfigurationError(f"{file.name}: not UTF-8 at byte {exc.start}; save the file as UTF-8") from exc
    except OSError as exc:
        raise ConfigurationError(unreadable.format(file=file, reason=exc.strerror)) from exc
