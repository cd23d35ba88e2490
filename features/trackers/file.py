"""Writes a run's metrics.jsonl, and validation's answers into val_generations.jsonl."""

from collections.abc import Mapping
from pathlib import Path

from features.trackers.interface import Generations
from training.run.metrics_file import LineFile, as_record, read_objects, read_records

GENERATIONS_FILE = "val_generations.jsonl"


class FileTracker:
    """Appends {"step": n, metric: value, …} to a .jsonl file, on the disk when `log` returns.

    NaN and infinities are the strings "nan", "inf" and "-inf", which JSON has no numbers for and
    float() reads. Validation's answers go into a file beside it.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        self.metrics = LineFile(path, resume_step, read_records)
        self.metrics.open()
        generations = path.with_name(GENERATIONS_FILE)
        self.generations = LineFile(generations, resume_step, read_objects)

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Writes the step's line and forces it to disk; a line without room leaves nothing."""
        self.metrics.append(as_record(data, step))

    def log_generations(self, rows: Generations, step: int) -> None:
        """Writes a line an answer: step, input, output, score and what else the row holds."""
        for row in rows:
            self.generations.append({"step": step, **row})

    def close(self, *, failed: bool = False) -> None:
        """Closes the files."""
        self.metrics.close()
        self.generations.close()
