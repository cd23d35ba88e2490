"""SHIM: trackers, run lock, recorded config."""

from training.run.files import force_to_disk as force_to_disk
from training.run.files import write_atomically as write_atomically
from training.run.recorded_config import record_config as record_config
from training.run.trackers import Tracking as Tracking
from training.run.trackers import cut_back as cut_back
from training.run.trackers import format_line as format_line
from training.run.trackers import read_records as read_records
from training.run.run_lock import run_lock as held  # noqa: F401
