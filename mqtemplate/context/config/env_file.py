"""Reader of ``.env`` files: environment variables in a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from mqtemplate.errors import ConfigurationError

ENV_FILE = ".env"


def read_env_file(file: Path) -> dict[str, str]:
    """Return the variables of a file. ``${NAME}`` is replaced by variables of the process and of the file.

    Raises:
        ConfigurationError: It cannot be read, or a line is no ``NAME=value``.
    """
    from dotenv.main import DotEnv  # only needed where there is such a file
    from dotenv.parser import parse_stream

    try:
        with file.open(encoding="utf-8-sig") as stream:
            for binding in parse_stream(stream):
                if binding.error:
                    raise ConfigurationError(
                        f"{file}:{binding.original.line}: {binding.original.string.strip()!r} is no variable; "
                        "write NAME=value"
                    )
        values = DotEnv(file, encoding="utf-8-sig", override=False).dict()
    except UnicodeDecodeError as exc:
        raise ConfigurationError(f"{file}: not UTF-8 at byte {exc.start}; save the file as UTF-8") from exc
    except OSError as exc:
        raise ConfigurationError(f"{file} cannot be read: {exc.strerror}; give the path of a file") from exc
    return {name: value for name, value in values.items() if value is not None}


def with_env_file(folder: Path) -> Mapping[str, str]:
    """Return the variables of the process and, below them, those of ``.env`` in a folder. The process is not changed.

    Raises:
        ConfigurationError: The file is invalid.
    """
    file = folder / ENV_FILE
    return below_environment(read_env_file(file)) if file.is_file() else os.environ


def below_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return *variables* and, above them, those of the process. An empty one counts as not given."""
    return {**variables, **{name: value for name, value in os.environ.items() if value or name not in variables}}
