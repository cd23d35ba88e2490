"""Finds what a configuration needs outside itself and does not find on this machine.

Packages and devices, files, users' code, algorithms, rewards, environments and models: a module
each. Every check is a generator of sentences; whatever a user's file raises when it is loaded is
one of them. A package that is slow to import (torch, transformers) is imported by the check that
needs it, and only where the config asks for it, so that `--explain` answers at once.
"""
