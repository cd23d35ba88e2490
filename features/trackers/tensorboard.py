"""Writes scalars and texts for TensorBoard into the run's folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from features.trackers.interface import GENERATIONS_NAME, Generations


class TensorBoardTracker:
    """Writes scalars for TensorBoard; a resumed run hides what came after its checkpoint."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = resume_step + 1 if resume_step else 0
        self.writer: Any = SummaryWriter(str(folder), purge_step=purge_step)

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Writes one scalar a metric."""
        for key, value in data.items():
            self.writer.add_scalar(key, value, step)
        self.writer.flush()

    def log_generations(self, rows: Generations, step: int) -> None:
        """Writes a text an answer, indented, so that markup in it is shown as it is."""
        for number, row in enumerate(rows):
            text = f"score {row['score']:.4f}\n{row['input']}\n--> {row['output']}"
            indented = "\n".join(f"    {line}" for line in text.splitlines())
            self.writer.add_text(f"{GENERATIONS_NAME}/{number}", indented, step)
        self.writer.flush()

    def close(self, *, failed: bool = False) -> None:
        """Closes the event file."""
        self.writer.close()
