"""Agents as their SDKs' makers write them, by name: `python sdk_clients.py NAME`.

None knows of the trainer, and whatever the policy says they go on. The last line says how many
requests were made, which is what is paid.
"""

import asyncio
import json
import os
import sys
from contextlib import suppress

QUESTION = [{"role": "user", "content": "guess"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {}, "b": {}}},
    },
}


def plain() -> None:
    """Two turns of OpenAI's SDK."""
    import openai

    client = openai.OpenAI()
    messages = list(QUESTION)
    for _ in range(2):
        answer = client.chat.completions.create(model="gpt-4o", messages=messages)
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        messages.append({"role": "user", "content": "higher"})


def stream() -> None:
    """The same, streamed."""
    import openai

    client = openai.OpenAI()
    messages = list(QUESTION)
    for _ in range(2):
        events = client.chat.completions.create(model="gpt-4o", messages=messages, stream=True)
        text = "".join(event.choices[0].delta.content or "" for event in events)
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": "lower"})


def parallel() -> None:
    """Three requests at once, and one that joins what they gave."""
    import openai

    client = openai.AsyncOpenAI()

    async def ask(text: str) -> str:
        messages = [{"role": "user", "content": text}]
        answer = await client.chat.completions.create(model="gpt-4o", messages=messages)
        return answer.choices[0].message.content

    async def play() -> None:
        answers = await asyncio.gather(*(ask(text) for text in ("guess", "higher", "lower")))
        await ask(" ".join(answers))

    asyncio.run(play())


def tools() -> None:
    """A loop over tools that ends with the first answer without a call."""
    import openai

    client = openai.OpenAI()
    messages = list(QUESTION)
    for _ in range(2):
        answer = client.chat.completions.create(model="gpt-4o", messages=messages, tools=[TOOL])
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
        if not message.tool_calls:
            messages.append({"role": "user", "content": "Use the tool."})


def anthropic() -> None:
    """Two turns of Anthropic's SDK, the second streamed."""
    import anthropic as sdk

    client = sdk.Anthropic()
    ask = {"model": "claude-opus-4", "max_tokens": 64, "system": "Be brief."}
    answer = client.messages.create(messages=QUESTION, **ask)
    messages = [*QUESTION, {"role": "assistant", "content": answer.content}]
    messages.append({"role": "user", "content": "lower"})
    with client.messages.stream(messages=messages, **ask) as events:
        events.get_final_message()


def smolagents(kind: str) -> None:
    """An agent of smolagents' that finds no answer in two steps, and then has to give one."""
    import smolagents as sdk

    @sdk.tool
    def add(a: int, b: int) -> int:
        """Adds two integers.

        Args:
            a: the first.
            b: the second.
        """
        return a + b

    model = sdk.OpenAIServerModel(
        model_id="gpt-4o",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
    )
    agent = getattr(sdk, kind)(tools=[add], model=model, max_steps=2, verbosity_level=0)
    agent.run("What is 2 + 3?")


def langgraph() -> None:
    """LangGraph's agent over LangChain's client."""
    import warnings

    from langchain_openai import ChatOpenAI

    warnings.simplefilter("ignore")
    from langgraph.prebuilt import create_react_agent

    def add(a: int, b: int) -> int:
        """Add two integers."""
        return a + b

    agent = create_react_agent(ChatOpenAI(model="gpt-4o"), tools=[add])
    state = agent.invoke({"messages": QUESTION})
    agent.invoke({"messages": [*state["messages"], *QUESTION]})


def openai_agents() -> None:
    """The SDK of OpenAI's agents: two turns over its responses API."""
    from agents import Agent, Runner, function_tool

    @function_tool
    def add(a: int, b: int) -> str:
        """Add two integers."""
        return str(a + b)

    agent = Agent(name="Adder", instructions="Use the tool.", tools=[add], model="gpt-4.1")
    result = Runner.run_sync(agent, "What is 2 + 3?", max_turns=3)
    Runner.run_sync(agent, [*result.to_input_list(), *QUESTION], max_turns=3)


CLIENTS = {
    "plain": plain,
    "stream": stream,
    "parallel": parallel,
    "tools": tools,
    "anthropic": anthropic,
    "smolagents_tools": lambda: smolagents("ToolCallingAgent"),
    "smolagents_code": lambda: smolagents("CodeAgent"),
    "langgraph": langgraph,
    "openai_agents": openai_agents,
}

if __name__ == "__main__":
    with suppress(BrokenPipeError):
        CLIENTS[sys.argv[1]]()
        print(json.dumps({"reward": int(os.environ["SEED"]) % 2}))
