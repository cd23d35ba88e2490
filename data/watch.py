"""SHIM: the watchdog."""

from data.watchdog import ATTEMPT as ATTEMPT
from data.watchdog import STALLED as STALLED
from data.watchdog import WAKE as WAKE
from data.watchdog import WATCHDOG as WATCH  # noqa: F401
from data.watchdog import Watchdog as Watch  # noqa: F401
from data.watchdog import WatchdogSettings as Watched  # noqa: F401
from data.watchdog import beat as beat
from data.watchdog import end_children as end_children
from data.watchdog import watching as watching
