"""Tools for the model: what users write, and what reads and executes calls.

Nothing is defined here: all of it is custom/tools.
"""

from custom.tools import *
