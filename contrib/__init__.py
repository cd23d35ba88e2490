"""Real features that one may delete without touching PPO: adapters, sandbox, memory plan, supervisor, verifiers."""
