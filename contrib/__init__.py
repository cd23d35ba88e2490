"""Real features that one may delete without touching PPO.

Adapters, sandbox, memory plan, supervisor, verifiers.
"""
