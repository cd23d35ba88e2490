"""The tools that come along, under the names that configs give: calculator and Python snippets.

Nothing is defined here: they live in custom/tools/calculator.py and contrib/sandbox.
"""

from contrib.sandbox.python_tool import PythonTool as PythonTool
from custom.tools.calculator import CalculatorTool as CalculatorTool
