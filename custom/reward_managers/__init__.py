"""Reward managers, a file each; custom/reward_manager.py has their names.

Nothing is imported here, so that a process of the prime manager loads prime_process.py alone.
"""
