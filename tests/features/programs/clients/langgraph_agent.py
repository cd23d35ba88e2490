"""LangGraph's ReAct agent over LangChain's client of OpenAI's API."""

import json
import warnings

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

warnings.simplefilter("ignore")


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


agent = create_react_agent(ChatOpenAI(model="gpt-4o"), tools=[add])
state = agent.invoke({"messages": [{"role": "user", "content": "What is 2 + 3?"}]})
print(json.dumps({"reward": float(state["messages"][-1].content == "It is 5.")}))
