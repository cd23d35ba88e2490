"""SHIM: the memory plan's names under the module that had them all."""

from contrib.memory_plan.live_memory import LiveMemory as Live  # noqa: F401
from contrib.memory_plan.planner import Planner as Planner
from contrib.memory_plan.terms import GIB as GIB
