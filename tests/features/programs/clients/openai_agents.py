"""The SDK of OpenAI's agents, as its README has it: a function as a tool, the responses API."""

import json

from agents import Agent, Runner, function_tool


@function_tool
def add(a: int, b: int) -> str:
    """Add two integers."""
    return str(a + b)


agent = Agent(name="Adder", instructions="Use the tool.", tools=[add], model="gpt-4.1")
result = Runner.run_sync(agent, "What is 2 + 3?", max_turns=5)
print(json.dumps({"reward": float(result.final_output == "It is 5.")}))
