"""Disk space that small applications take, as ``du`` counts it: blocks, not lengths."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from bench.measure import report, run, scratch_folder
from mqtemplate import MQApplication

_MIB = 1 << 20


def used_bytes(folder: Path) -> int:
    """Return the disk space of a folder with its subfolders."""
    return sum(path.lstat().st_blocks * 512 for path in [folder, *folder.rglob("*")])


def by_part(folder: Path) -> str:
    """Return the space of each file or folder in a store directory, the largest first."""
    parts: Counter[str] = Counter()
    for path in folder.rglob("*"):
        parts[path.relative_to(folder).parts[0]] += path.lstat().st_blocks * 512
    return ", ".join(f"{name} {size / 1_024:,.0f} KiB" for name, size in parts.most_common() if size)


def measure(name: str, days: int, messages: int) -> None:
    """Measure an application that starts once a day and sends some messages, a third of them delayed."""
    with scratch_folder() as folder:
        for _ in range(days):
            with MQApplication(settings={"rocketmq.name-server": f"embedded:{folder}"}, environment={}) as app:
                for number in range(messages):
                    delay = {0: {}, 1: {"delay_level": 3}, 2: {"delay": f"1h {number}s"}}[number % 3]
                    app.template.sync_send(f"topic-{number % 5}:tag", b"x" * 200, **delay)
        report(name, used_bytes(folder) / _MIB, "MiB", "< 8 MiB")
        print(f"  {by_part(folder)}")


def main() -> None:
    measure("hello world: three messages, two of them delayed", 1, 3)
    measure("a thousand messages in five topics", 1, 1_000)
    measure("a hundred messages on each of ten days", 10, 100)


if __name__ == "__main__":
    run(main)
