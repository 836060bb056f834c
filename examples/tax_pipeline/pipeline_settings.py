"""The section ``tax-pipeline`` of application.yml."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel


class PipelineSettings(BaseModel, frozen=True):
    """Where the pipeline works, and on how much."""

    folder: Path
    payments: int

    @property
    def input_file(self) -> Path:
        return self.folder / "tax-data-2021S4.jsonl"

    @property
    def result_folder(self) -> Path:
        return self.folder / "sums.parquet"
