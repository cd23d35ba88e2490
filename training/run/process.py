"""SHIM: signals, Ray's start and end, restarts."""

from contrib.supervisor import Supervisor as Supervisor
from training.run.exit_codes import MEND as MEND
from training.run.exit_codes import OUT_OF_MEMORY as OUT_OF_MEMORY
from training.run.ray_cluster import OWN_CLUSTER as OWN_CLUSTER
from training.run.ray_cluster import has_gpus as has_gpus
from training.run.ray_cluster import ray_cluster as ray_cluster
from training.run.signals import EndingSignals as EndingSignals
from training.run.signals import give_signals_back as give_signals_back
from contrib.supervisor import FINAL_CODES as FINAL  # noqa: F401
from training.run.ray_cluster import warn_of_busy_cores as say_busy_cores  # noqa: F401
from training.run.signals import ENDING_SIGNALS as ENDING  # noqa: F401
from training.run.signals import set_handlers as handle  # noqa: F401
