"""Starts a run again that crashed or hangs: supervisor.max_restarts."""
