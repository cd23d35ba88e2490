"""Games whose code asks the policy, for the tests of policy_calls; in any home."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from typing import Any, ClassVar

from custom.env import BaseEnvironment, Trajectory
from custom.tools import Tool, ToolDefinition
from features.policy_calls import PolicyError, policy


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Asker(BaseEnvironment):
    """Asks the policy once in each step; two steps."""

    turns = 2

    def reset(self, seed: int | None = None) -> str:
        self.draw = random.Random(seed)
        self.turn = 0
        self.replies: list[Any] = []
        return "guess"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        self.turn += 1
        self.ask(action)
        said = self.replies[-1].text if self.replies else ""
        return f"higher {said}", float(self.turn), self.turn >= self.turns, {}

    def ask(self, action: str) -> None:
        self.replies.append(policy.ask(f"number {self.turn}"))


class Critic(Asker):
    """Asks a masked question, and one that it pays by itself."""

    def ask(self, action: str) -> None:
        self.replies.append(policy.ask("the number is", train=False))
        critic = policy.ask(f"correct {action[:20]}", name="critic")
        critic.reward = 0.25 * self.turn
        self.replies.append(critic)


class Talker(Asker):
    """Goes on with a conversation of its own, in one row."""

    def ask(self, action: str) -> None:
        if self.turn == 1:
            self.talk = [user("guess")]
        self.replies.append(policy.ask(self.talk))
        self.talk += [self.replies[-1].message, user("higher")]


class SideBySide(Asker):
    """Asks three questions at once, by tasks and by a list."""

    def ask(self, action: str) -> None:
        questions = [f"number {number}" for number in (3, 1, 2)]
        if self.turn == 1:
            self.replies += policy.ask_all(questions)
            return

        async def talk() -> list[Any]:
            return list(await asyncio.gather(*[policy.chat(question) for question in questions]))

        self.replies += asyncio.run(talk())


class InReset(Asker):
    """Asks in its reset, too."""

    def reset(self, seed: int | None = None) -> str:
        first = super().reset(seed)
        return f"{first} {policy.ask('number')}"


class ForEver(Asker):
    """Asks for ever, whatever it is told."""

    def ask(self, action: str) -> None:
        while True:
            try:
                policy.ask("guess")
            except PolicyError as error:
                assert error.refusal == "limit"


class UntilRefused(Asker):
    """Asks until it is told that it may not, and says what it was told."""

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        asked = 0
        try:
            while True:
                policy.ask("guess", max_tokens=2)
                asked += 1
        except PolicyError as error:
            return "", float(asked), True, {"was": 1.0, "task": str(error)[:60]}


class LetsPass(Asker):
    """Asks what has no room."""

    def ask(self, action: str) -> None:
        policy.ask("higher " * 500)


class Slow(Asker):
    """Takes a while itself, in three parts."""

    def ask(self, action: str) -> None:
        for _ in range(2):
            time.sleep(0.2)
            self.replies.append(policy.ask("guess"))
        time.sleep(0.2)


class FromThread(Asker):
    """Asks from a thread of its own."""

    def ask(self, action: str) -> None:
        raised: list[BaseException] = []

        def run() -> None:
            try:
                policy.ask("guess")
            except RuntimeError as error:
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        raise raised[0]


class PaysLate(Asker):
    """Pays the first reply at the end, and one of another episode."""

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        result = super().step(action)
        if self.turn == 2:
            self.replies[0].reward = -1.0
        return result


class SubAgent(Tool):
    """Has the policy answer a question, whose answer may call the tool again."""

    definition = ToolDefinition(
        name="sub_agent",
        description="Answers a question.",
        parameters={
            "type": "object",
            "properties": {"question": {"type": "string"}},
            "required": ["question"],
        },
        timeout_s=30.0,
    )

    def execute(self, question: str) -> str:
        return policy.ask(question[:40]).text


def judged(trajectory: Trajectory, environment: Any) -> float:
    """A reward that the policy is asked for."""
    verdict = policy.ask("correct", train=False)
    return float(len(verdict.text) % 3)


def judged_and_paid(trajectory: Trajectory, environment: Any) -> float:
    """A reward, and one of the reply's own."""
    verdict = policy.ask("correct", name="judge")
    verdict.reward = 0.5
    return 2.0


class Faulty(Asker):
    """Asks, or pays, what it may not; `fault` says what."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        if self.fault == "nothing":
            policy.ask([])
        if self.fault == "number":
            policy.ask(5)  # type: ignore[arg-type]
        if self.fault == "role":
            policy.ask([{"role": "critic", "content": "guess"}])
        if self.fault == "content":
            policy.ask([{"role": "user", "content": None}])  # type: ignore[dict-item]
        if self.fault == "max_tokens":
            policy.ask("guess", max_tokens=0)
        if self.fault == "name":
            policy.ask("guess", name="")
        if self.fault == "unprintable":
            policy.ask("guess", name="critic\n\ud800")
        if self.fault == "train":
            policy.ask("guess", train="false")  # type: ignore[arg-type]
        if self.fault == "a text":
            policy.ask_all("guess")
        if self.fault == "group":
            asyncio.run(group_too_long())
        if self.fault == "nan":
            policy.ask("guess").reward = float("nan")
        if self.fault == "masked":
            policy.ask("guess", train=False).reward = 1.0
        if self.fault == "task":
            asyncio.run(asyncio.wait_for(policy.chat([]), 5))
        if self.fault == "gathered":
            asyncio.run(gather_too_long())
        return "higher", 0.0, True, {}


async def gather_too_long() -> None:
    await asyncio.gather(policy.chat("guess"), policy.chat("higher " * 500))


async def group_too_long() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(policy.chat("guess"))
        group.create_task(policy.chat("higher " * 500))


class Forgetful(Asker):
    """Pays a reply of the episode before, and asks behind the end of a call."""

    kept: ClassVar[list[Any]] = []

    def ask(self, action: str) -> None:
        if self.kept:
            self.kept[0].reward = 1.0
        self.kept.append(policy.ask("guess"))


class Dies(Asker):
    """Dies while it waits for an answer."""

    def ask(self, action: str) -> None:
        threading.Timer(0.1, os._exit, (7,)).start()
        time.sleep(0.02)
        policy.ask("guess")
        time.sleep(5)


class Deaf(Asker):
    """Catches all that it is told, and ends when it may."""

    def ask(self, action: str) -> None:
        for _ in range(50):
            try:
                policy.ask("guess")
            except BaseException:
                self.told = True


class InBuild(Asker):
    """Asks where there is no episode yet."""

    def __init__(self) -> None:
        super().__init__()
        policy.ask("guess")


class Awaiting(BaseEnvironment):
    """Is all `async def`, and keeps what belongs to its event loop from call to call."""

    async def reset(self, seed: int | None = None) -> str:
        self.draw = random.Random(seed)
        self.turn = 0
        self.lock = asyncio.Lock()
        self.loop = asyncio.get_running_loop()
        self.said = asyncio.Queue()  # type: ignore[var-annotated]
        reply = await policy.chat("number", train=False)
        await self.said.put(reply.text)
        return "guess"

    async def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        assert asyncio.get_running_loop() is self.loop
        self.turn += 1
        async with self.lock:
            asked = await asyncio.gather(
                policy.chat(f"number {self.turn}", train=True),
                policy.chat(f"guess {await self.said.get()}", name="critic"),
            )
        asked[1].reward = 0.5 * self.turn
        await self.said.put(asked[0].text)
        return f"higher {asked[0]}", float(self.turn), self.turn >= 2, {}

    async def anchor(self) -> str:
        return f"turn {self.turn}"

    async def get_state_description(self) -> str:
        return "number"

    async def close(self) -> None:
        assert asyncio.get_running_loop() is self.loop
        await asyncio.sleep(0)


class Blocking(Awaiting):
    """Asks the same as `Awaiting`, in functions that wait."""

    def reset(self, seed: int | None = None) -> str:  # type: ignore[override]
        self.draw = random.Random(seed)
        self.turn = 0
        self.words = policy.ask("number", train=False).text
        return "guess"

    def step(self, action: str) -> Any:  # type: ignore[override]
        self.turn += 1
        both = [f"number {self.turn}", f"guess {self.words}"]
        asked = asyncio.run(self.both(both))
        asked[1].reward = 0.5 * self.turn
        self.words = asked[0].text
        return f"higher {asked[0]}", float(self.turn), self.turn >= 2, {}

    def anchor(self) -> str:  # type: ignore[override]
        return f"turn {self.turn}"

    def get_state_description(self) -> str:  # type: ignore[override]
        return "number"

    async def both(self, both: list[str]) -> Any:
        return await asyncio.gather(policy.chat(both[0]), policy.chat(both[1], name="critic"))

    def close(self) -> None:  # type: ignore[override]
        pass


class AwaitsForEver(Awaiting):
    """Asks for ever, in an event loop."""

    async def step(self, action: str) -> Any:
        while True:
            try:
                await policy.chat("guess")
            except PolicyError as error:
                assert error.refusal == "limit"


class Hangs(Awaiting):
    """Waits for what never comes, beside tasks that nothing awaits."""

    async def step(self, action: str) -> Any:
        self.task = asyncio.create_task(asyncio.sleep(3600))
        await asyncio.Event().wait()


class LeavesTasks(Asker):
    """Asks by a task that a step leaves behind; the next step is told what came of it."""

    task: Any = None
    told = ""

    async def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:  # type: ignore[override]
        self.turn += 1
        if self.task is not None:
            await asyncio.wait([self.task])
            self.told = str(self.task.exception())
        self.task = asyncio.create_task(policy.chat("guess"))  # type: ignore[var-annotated]
        return "higher", 0.0, self.turn >= 2, {"task": self.told[:60]}


class AwaitingAgent(Tool):
    """Asks in an event loop; stays beyond its deadline where it is told to."""

    definition = ToolDefinition(
        name="sub_agent",
        description="Answers a question.",
        parameters=SubAgent.definition.parameters,
        timeout_s=0.3,
    )
    cancelled: ClassVar[list[str]] = []

    async def execute(self, question: str) -> str:
        if question == "hang":
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                self.cancelled.append(question)
                raise
        return (await policy.chat(question[:40])).text


async def judged_later(trajectory: Trajectory, environment: Any) -> float:
    """A reward that the policy is asked for, in an event loop."""
    verdict = await policy.chat("correct", train=False)
    return float(len(verdict.text) % 3)
