"""The Python tool: snippets that the policy writes, in a process with limits.

python_tool      the caller's side: PythonTool, named `python` in `agent.tools`
python_snippet   the child's side, a program of its own that raises the walls
walls            tries which of the walls this machine allows
"""
