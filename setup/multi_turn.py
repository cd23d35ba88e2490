"""Conversations with an engine, and episodes in an environment, with tools.

Invariant: an episode is the turn loop's (workers/rollout), as in training.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from custom.agent import Agent, AgentSpec, as_user_messages
from custom.env import Message
from custom.tools import EpisodeSummary, MultiTurnManager
from data.chat_templates import render_chat
from data.turn_tokens import TurnTokens
from setup.engines import BaseInferenceEngine
from workers.environments.pool import EnvironmentPool
from workers.rollout.engine import Sampling
from workers.rollout.episode import FAILURES, Episode, TurnLimits
from workers.rollout.episode_facts import episode_facts
from workers.rollout.turn_loop import Batch, TurnLoop


class CallersAgent(Agent):
    """Plays an environment that is its caller's, who goes on with it: it stays open."""

    def close(self) -> None:
        """Leaves the environment open."""


@dataclass
class MultiTurnInferenceEngine:
    """Holds conversations, and plays episodes in an environment.

    Attributes:
        engine: what answers.
        max_turns: of an episode.
        system_prompt: in place of the environment's.
        tool_manager: its tools and parser are used, unless `enable_tools` is false.
        messages: of the conversation so far.
    """

    engine: BaseInferenceEngine
    max_turns: int = 10
    system_prompt: str = ""
    tool_manager: MultiTurnManager | None = None
    enable_tools: bool = True
    messages: list[Message] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.manager = self.tool_manager if self.enable_tools else None
        self.schemas = None if self.manager is None else self.manager.registry.schemas()

    # Conversations

    def start_conversation(self, prompt: str) -> None:
        """Begins anew, with the system prompt and a user's message."""
        self.messages = []
        if self.system_prompt:
            self.add_message(self.system_prompt, role="system")
        self.add_message(prompt)

    def add_message(self, content: str, role: str = "user") -> None:
        """Adds what the next answer is to."""
        self.messages.append({"role": role, "content": content})

    def step(self, max_tokens: int = 256, **sampling: Any) -> str:
        """Answers the conversation so far; the results of tools that it calls are added to it."""
        if not self.messages:
            raise ValueError("there is no conversation: call start_conversation(prompt) first")
        output = self.engine.generate(self.messages, max_tokens, tools=self.schemas, **sampling)
        answer = output.sequences[0]
        self.add_message(answer, "assistant")
        if self.manager is not None and self.manager.parser.parse(answer):
            self.messages += as_user_messages(self.manager.step(answer).observation)
        return answer

    def format_conversation(self) -> str:
        """Returns the conversation in the model's chat template; ChatML where it has none."""
        return render_chat(self.engine.tokenizer, self.messages, tools=self.schemas)

    # Episodes

    def run_episode(
        self,
        environment: Any,
        initial_prompt: str = "",
        max_turns: int = 0,
        max_tokens: int = 256,
        **sampling: Any,
    ) -> EpisodeSummary:
        """Plays an episode in this very environment.

        Args:
            initial_prompt: comes before the environment's first observation.
            max_turns: 0: the engine's own.
            sampling: as of `BaseInferenceEngine.generate`, `seed` too.

        Raises:
            RuntimeError: the environment failed; says how.
        """
        agent = self._make_agent(environment, initial_prompt)
        first_sampling = self.engine.sampling(max_tokens, **sampling)
        episode = Episode(group=0, sample=0, seed=first_sampling.seed)
        self._play(episode, agent, first_sampling, max_turns or self.max_turns)
        if episode.ending in FAILURES:
            raise RuntimeError(f"the episode ended as {episode.ending}: {episode.error}")
        self.messages = [*episode.messages]
        facts = episode_facts(episode)
        return EpisodeSummary(episode.turns, facts["tool_calls"], facts["reward"], episode.ending)

    def _make_agent(self, environment: Any, initial_prompt: str) -> Agent:
        """Makes the agent of an episode, which shares the tool manager and its statistics."""
        agent = CallersAgent(
            environment, system_prompt=self.system_prompt, initial_prompt=initial_prompt
        )
        if self.manager is not None:
            self.manager.environment = environment
            agent.manager = self.manager
            agent.tools = self.manager.registry
        return agent

    def _play(
        self, episode: Episode, agent: Agent, first_sampling: Sampling, max_turns: int
    ) -> None:
        """Plays an episode to its end by the turn loop, with a seed for each of its turns."""

        def sampling_of_turn(episode: Episode, turn: int | None = None) -> Sampling:
            number = len(episode.turns) if turn is None else turn
            return replace(first_sampling, seed=first_sampling.seed + number)

        rollout = self.engine.rollout
        limits = TurnLimits(
            prompt_length=rollout.max_model_len,
            response_length=rollout.max_model_len,
            max_model_len=rollout.max_model_len,
            max_turn=max_turns,
        )
        tokens = TurnTokens(
            self.engine.tokenizer, template_kwargs={}, eos_token_ids=rollout.eos_token_ids
        )
        with EnvironmentPool([AgentSpec(environment=None, agent_cls=lambda: agent)]) as pool:
            loop = TurnLoop(rollout, tokens=tokens, environments=pool, tools=pool.tool_schemas)
            loop.run(Batch([episode], sampling_of_turn, [limits]))

    # Training

    def agent_spec(self) -> AgentSpec:
        """Returns what training takes over: tools, parser, system prompt and `max_turns`."""
        spec = AgentSpec(
            environment=None, max_turn=self.max_turns, system_prompt=self.system_prompt
        )
        return with_tools(spec, self.manager)


def with_tools(spec: AgentSpec, manager: MultiTurnManager | None) -> AgentSpec:
    """Returns the spec with a manager's tools and parser; as it is where there is no manager."""
    if manager is None:
        return spec
    return replace(spec, tools=tuple(manager.registry.tools.values()), parser=manager.parser)
