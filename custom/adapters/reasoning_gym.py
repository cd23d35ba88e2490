"""SHIM: moved to contrib/adapters."""

from contrib.adapters.reasoning_gym import ReasoningGymEnvironment as ReasoningGymEnvironment
