"""Changes of source and configuration files, for ``mqtemplate run --reload``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mqtemplate.errors import ConfigurationError

# Not .json: the store directory has such files, and the broker writes them every few seconds.
_SUFFIXES = (".py", ".yml", ".yaml", ".toml", ".env")


@contextmanager
def file_changes(folders: Sequence[Path], on_change: Callable[[list[str]], object]) -> Iterator[None]:
    """Call a function in a thread, inside the context, with the names of files that have changed.

    Args:
        folders: Folders with all that is in them, except hidden ones, virtual environments and caches. None: no thread.

    Raises:
        ConfigurationError: watchfiles is not installed, or a folder is missing.
    """
    if not folders:
        yield
        return
    try:
        import watchfiles
    except ImportError as exc:
        raise ConfigurationError(
            "--reload needs watchfiles, which is not installed; pip install 'mqtemplate[reload]'"
        ) from exc
    for folder in folders:
        if not folder.is_dir():
            raise ConfigurationError(f"--reload-dir {folder} is no folder; give one with source files")
    stop = threading.Event()

    class SourceFilter(watchfiles.DefaultFilter):
        def __call__(self, change: watchfiles.Change, path: str) -> bool:
            return path.endswith(_SUFFIXES) and super().__call__(change, path)

    def watch() -> None:
        for changes in watchfiles.watch(
            *folders, watch_filter=SourceFilter(), stop_event=stop, rust_timeout=500, raise_interrupt=False
        ):
            on_change(sorted({_shown(Path(path)) for _, path in changes}))

    thread = threading.Thread(target=watch, name="mqtemplate-reload", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
