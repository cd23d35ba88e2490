"""The tools that come along, under the names that configs give: calculator and Python snippets.

Nothing is defined here: they live in custom/tools/calculator.py and features/sandbox.
"""

from custom.tools.calculator import CalculatorTool as CalculatorTool
from features.sandbox.python_tool import PythonTool as PythonTool
