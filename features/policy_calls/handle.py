"""`policy`: what code of an episode asks the policy by, in threads, processes and Ray actors.

Invariant: a question ends with a reply or an error, and the call that asks waits where it stands;
whatever else the run does goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from custom.asking import (
    UNNAMED,
    AskingLine,
    PolicyAnswer,
    Question,
    Refusal,
    current_depth,
    current_line,
    deeper,
)
from custom.env import ROLES, BadEnvironment, Message
from custom.env_calls import MAX_NAME_CHARS, check_observation, check_reward, shown
from custom.model_errors import ModelError

# A text is one message of a user's.
Asked: TypeAlias = str | Sequence[Message]
# Longer messages are cut in the middle; tokens have limits of their own.
MAX_CHARS = 1_000_000
NO_CALL = (
    "the policy can be asked while a reset, a step or a reward_fn(trajectory, environment) of an "
    "episode runs, by the code that runs in it, and none runs here. A function that scores rows "
    "runs on the driver while the engines sleep: ask in a reward_fn of episodes. A thread of your "
    "own is not the call's: use policy.ask_all, or asyncio.gather of policy.chat"
)
OFF = "policy_calls.enable=false: set policy_calls.enable=true for an episode's code to ask it"


class PolicyUnavailable(RuntimeError):
    """Reports that the policy was asked where no episode is played."""


class PolicyError(ModelError):
    """Reports that the policy gives no answer.

    An environment that lets it pass has crashed, and so has an episode whose reward_fn does.

    Attributes:
        refusal: why, as a word; see custom/asking.py.
    """

    def __init__(self, message: str, refusal: Refusal) -> None:
        super().__init__(message, "not_set_up" if refusal == "not_set_up" else "refused")
        self.refusal = refusal


@dataclass(eq=False)
class PolicyReply:
    """Holds what the policy answered.

    Attributes:
        text: what it wrote.
        finish_reason: `stop`, or `length` where a limit cut it.
        tokens: that were sampled.
        trained: it is trained on.
    """

    text: str
    finish_reason: str
    tokens: int
    trained: bool
    _number: int
    _episode: int
    _reward: float | None = field(default=None, init=False)

    @property
    def message(self) -> Message:
        """Returns the reply as the assistant's message, for a conversation that goes on."""
        return {"role": "assistant", "content": self.text}

    @property
    def reward(self) -> float | None:
        """Returns what the reply has earned by itself; None: it earns what the episode does."""
        return self._reward

    @reward.setter
    def reward(self, reward: float) -> None:
        """Pays the reply a reward of its own, until its episode ends.

        Raises:
            ValueError: it is not trained on, or the reward is no number.
            RuntimeError: its episode is over, or no call of it runs.
        """
        if not self.trained:
            raise ValueError(
                "a reply of train=False is not trained on, and bears no reward: ask with train=True"
            )
        paid = check_reward(reward, "a reply")
        line = current_line()
        if line is None:
            raise PolicyUnavailable(NO_CALL)
        if line.episode != self._episode:
            raise RuntimeError("the episode of this reply is over, and it cannot be paid any more")
        line.pay(self._number, paid)
        self._reward = paid

    def __str__(self) -> str:
        return self.text


class Policy:
    """Asks the policy that is trained.

    Each method takes a text, or messages in OpenAI's form, and

        train: the reply is trained on, as the episode's turns are; False: its tokens have mask 0.
        max_tokens: of the reply, beside the limits of `policy_calls`.
        name: who is asked, such as `critic`: records name it, and replies of one name that have a
            reward of their own are compared with each other.

    Messages that go on from an earlier reply of the episode go on in its row, with the very tokens
    that were sampled. They raise

        PolicyError: there is no answer; says why.
        PolicyUnavailable: no episode is played here.
    """

    is_set_up = False

    def ask(
        self,
        question: Asked,
        *,
        train: bool = True,
        max_tokens: int | None = None,
        name: str = UNNAMED,
    ) -> PolicyReply:
        """Returns the policy's reply; waits for it."""
        [reply] = self.ask_all([question], train=train, max_tokens=max_tokens, name=name)
        return reply

    def ask_all(
        self,
        questions: Sequence[Asked],
        *,
        train: bool = True,
        max_tokens: int | None = None,
        name: str = UNNAMED,
    ) -> list[PolicyReply]:
        """Returns the replies to several questions, which are sampled side by side."""
        if isinstance(questions, str):
            raise BadEnvironment(
                f"policy.ask_all was given {shown(questions)}; allowed: a list of questions. "
                "policy.ask asks a single one"
            )
        asked = [_question(each, train, max_tokens, name) for each in questions]
        line = self._line()
        if not asked:
            return []
        return _replies(asked, line.ask(asked), line)

    async def chat(
        self,
        messages: Asked,
        train: bool = True,
        *,
        max_tokens: int | None = None,
        name: str = UNNAMED,
    ) -> PolicyReply:
        """Does as `ask` for an event loop; what tasks ask at once is answered together."""
        asked = _question(messages, train, max_tokens, name)
        line = self._line()
        [reply] = _replies([asked], [await line.ask_async(asked)], line)
        return reply

    def deeper(self) -> AbstractContextManager[None]:
        """Makes what is asked in a `with` block one deeper, as by a sub-agent of a sub-agent.

        Calls of tools do so by themselves.
        """
        return deeper()

    def _line(self) -> AskingLine:
        line = current_line()
        if line is None:
            raise PolicyUnavailable(NO_CALL)
        if not self.is_set_up:
            raise PolicyError(OFF, "not_set_up")
        return line


policy = Policy()


def _question(asked: Asked, train: Any, max_tokens: Any, name: Any) -> Question:
    """Makes a question of what a user gave.

    Raises:
        BadEnvironment: it is none.
    """
    where = "policy.ask, or chat,"
    messages: Any = asked
    if isinstance(asked, str):
        messages = [{"role": "user", "content": asked}]
    if not isinstance(messages, list | tuple):
        raise BadEnvironment(
            f"{where} was given {shown(asked)}; allowed: a text, or a list of messages "
            "{'role': ..., 'content': ...}"
        )
    for message in messages:
        is_message = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not is_message or message.get("role") not in ROLES:
            raise BadEnvironment(
                f"{where} was given the message {shown(message)}; allowed: {{'role': one of "
                f"{', '.join(ROLES)}, 'content': a text}}"
            )
    checked = check_observation(list(messages), "a question to the policy", MAX_CHARS)
    if not isinstance(checked, list) or not checked:
        raise BadEnvironment(f"{where} was given no message; give a text, or one message or more")
    is_name = isinstance(name, str) and name.strip() and name.isprintable()
    if not is_name or len(name) > MAX_NAME_CHARS:
        raise BadEnvironment(
            f"{where} was given name={shown(name)}; allowed: a text of 1 to {MAX_NAME_CHARS} "
            "characters that can be printed"
        )
    if not isinstance(train, bool):
        raise BadEnvironment(f"{where} was given train={shown(train)}; allowed: True or False")
    is_count = isinstance(max_tokens, int) and not isinstance(max_tokens, bool) and max_tokens > 0
    if max_tokens is not None and not is_count:
        raise BadEnvironment(
            f"{where} was given max_tokens={shown(max_tokens)}; allowed: 1 or more, or None"
        )
    return Question(
        messages=checked,
        trained=train,
        name=name,
        max_tokens=max_tokens,
        depth=current_depth(),
    )


def _replies(
    asked: Sequence[Question], answers: Sequence[PolicyAnswer], line: AskingLine
) -> list[PolicyReply]:
    """Makes replies of answers. Raises PolicyError where one was refused."""
    for answer in answers:
        if answer.refusal:
            raise PolicyError(answer.error, answer.refusal)
    return [
        PolicyReply(
            text=answer.text,
            finish_reason=answer.finish_reason,
            tokens=answer.tokens,
            trained=question.trained,
            _number=answer.number,
            _episode=line.episode,
        )
        for question, answer in zip(asked, answers, strict=True)
    ]
