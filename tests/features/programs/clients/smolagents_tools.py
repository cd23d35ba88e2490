"""smolagents' ToolCallingAgent and CodeAgent, one after the other."""

import json
import os

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Adds two integers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


model = OpenAIServerModel(
    model_id="m", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
agent = ToolCallingAgent(tools=[add], model=model, max_steps=3, verbosity_level=0)
called = agent.run("What is 2 + 3?")
written = CodeAgent(tools=[add], model=model, max_steps=3, verbosity_level=0).run("And 3 + 4?")
print(json.dumps({"reward": (float(str(called) == "5") + float(str(written) == "7")) / 2}))
