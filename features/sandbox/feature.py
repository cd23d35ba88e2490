"""The Python tool, `python` in agent.tools: snippets in a process with walls around it."""

from training.features import Feature

FEATURE = Feature(moved_modules={"contrib.sandbox": "features.sandbox"})
