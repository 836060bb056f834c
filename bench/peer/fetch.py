"""Packages from Maven that `make setup` leaves out: the bench that needs them fetches them into ``.rocketmq``."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

PACKAGES_FOLDER = Path(__file__).parents[2] / ".rocketmq"
_POMS = Path(__file__).with_name("packages")
_FETCH_SECONDS = 600


def fetch(name: str, title: str) -> str | None:
    """Fetch the packages of a folder of ``packages/`` if they are missing. Return the reason if that fails.

    Args:
        title: What it is, for the user.
    """
    if (PACKAGES_FOLDER / name).exists():
        return None
    maven = shutil.which("mvn")
    if maven is None:
        return f"no Maven found (mvn, by PATH), which fetches {title}"
    print(f"Fetching {title} from Maven into .rocketmq/{name}, about 100 MB the first time.", flush=True)
    PACKAGES_FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{name}.tmp-", dir=PACKAGES_FOLDER) as folder:
        goal = ("dependency:copy-dependencies", f"-Dpeer.folder={folder}")
        try:
            done = subprocess.run(
                [maven, "--batch-mode", "--file", str(_POMS / name / "pom.xml"), *goal],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_FETCH_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"Maven did not fetch {title} in {_FETCH_SECONDS} s"
        if done.returncode:
            lines = (done.stdout + done.stderr).splitlines()
            errors = [line.removeprefix("[ERROR] ") for line in lines if line.startswith("[ERROR] ")] or lines[-1:]
            return f"Maven could not fetch {title}: {errors[0] if errors else 'no error text'}"
        Path(folder, name).rename(PACKAGES_FOLDER / name)
    return None
