"""SHIM: the names of this module stand in the files that they are imported from."""

from workers.environments.clock import task_clock as own_clock  # noqa: F401
from workers.environments.fork_server import ForkServer as ForkServer
from workers.environments.fork_server import libraries_of as libraries_of
from workers.environments.fork_server_process import run_fork_server as run_fork_server
from workers.environments.reply import MAX_NAME_CHARS as MAX_NAME_CHARS
from workers.environments.reply import MAX_NUMBERS as MAX_NUMBERS
from workers.environments.reply import Call as Call
from workers.environments.reply import Failure as Failure
from workers.environments.reply import StepReply as StepReply
from workers.environments.reply import WorkerLost as WorkerLost
from workers.environments.reply import crashed as crashed
from workers.environments.reply import numbers as numbers
from workers.environments.reply import read_reply as unpack  # noqa: F401
from workers.environments.reply import tool_calls as tool_calls
from workers.environments.server import EnvServer as EnvServer
from workers.environments.workers import EnvWorker as EnvWorker
from workers.environments.workers import Isolation as Isolation
from workers.environments.workers import ProcessWorker as ProcessWorker
from workers.environments.workers import RayWorker as RayWorker
from workers.environments.workers import ThreadWorker as ThreadWorker
from workers.environments.workers import make_worker as make_worker
from workers.environments.workers import pickled as pickled
