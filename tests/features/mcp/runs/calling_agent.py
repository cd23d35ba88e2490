"""An agent of test_mcp_runs.py whose policy cannot write calls: each answer is one."""

from __future__ import annotations

import json

from custom.agent import Agent
from custom.env import StepResult


class Caller(Agent):
    """Calls the tool that adds, or `act` where there is none, whatever the policy writes."""

    def step(self, response_text: str) -> StepResult:
        assert self.tools is not None
        name, arguments = "act", {}
        if "add" in self.tools.tools:
            name, arguments = "add", {"amount": 1}
        return super().step(json.dumps({"name": name, "arguments": arguments}))
