"""The section ``tax-pipeline`` of application.yml."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel


class PipelineSettings(BaseModel, frozen=True):
    """Working directory and size of the pipeline."""

    folder: Path
    payments: int

    @property
    def input_file(self) -> Path:
        """File with the payments."""
        return self.folder / "tax-data-2021S4.jsonl"

    @property
    def store_folder(self) -> Path:
        """Folder of the broker."""
        return self.folder / "store"

    @property
    def result_folder(self) -> Path:
        """Directory of the Parquet files."""
        return self.folder / "sums.parquet"
