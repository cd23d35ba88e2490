"""SHIM: the names of this module stand in the files that they are imported from."""

from workers.ranks.dispatch import ClassWithInitArgs as ClassWithInitArgs
from workers.ranks.dispatch import Colocated as Colocated
from workers.ranks.dispatch import Dispatch as Dispatch
from workers.ranks.dispatch import RayClassWithInitArgs as RayClassWithInitArgs
from workers.ranks.dispatch import create_colocated_worker_cls as create_colocated_worker_cls
from workers.ranks.dispatch import register as register
from workers.ranks.dispatch import registered_methods as registered_methods
from workers.ranks.dispatch import split_batch as cut  # noqa: F401
from workers.ranks.local_group import LocalWorkerGroup as LocalWorkerGroup
from workers.ranks.ray_group import RayWorkerGroup as RayWorkerGroup
from workers.ranks.ray_group import wait_for as wait_for
from workers.ranks.resource_pool import RayResourcePool as RayResourcePool
from workers.ranks.worker_host import WorkerHost as WorkerHost
from workers.ranks.worker_host import worker_environment as worker_environment
