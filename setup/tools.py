"""Tools for the model: what users write, and what reads and executes calls.

A public path: `from setup.tools import Tool` and the rest. All of it is custom/tools.
"""

from custom.tools import *
