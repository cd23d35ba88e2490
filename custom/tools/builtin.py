"""The tools that come along, under the names that configs give: calculator and Python snippets.

Nothing is defined here: they live in custom/tools/calculator.py and features/sandbox, of which
the second is imported at first use.
"""

from typing import TYPE_CHECKING

from custom.tools.calculator import CalculatorTool as CalculatorTool
from data.late_names import late_names

if TYPE_CHECKING:
    from features.sandbox.python_tool import PythonTool as PythonTool
else:
    __getattr__ = late_names(__name__, {"PythonTool": "features.sandbox.python_tool"})
