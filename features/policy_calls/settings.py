"""The settings of the policy inside: whether it may be asked, and how often."""

from __future__ import annotations

from training.config.section import PositiveInt, Section


class PolicyCallsSettings(Section):
    """Bounds what environments, tools and rewards ask the policy, for each episode."""

    enable: bool = False  #: environments, tools and a reward_fn of episodes may ask the policy
    max_calls: PositiveInt = 64  #: answers of an episode; further questions are refused
    #: of a question: 1 for what a step asks, 2 for what a tool asks that such an answer called
    max_depth: PositiveInt = 4
    #: tokens of an answer; null = as many as its row has room for
    max_tokens: PositiveInt | None = None
    max_episode_tokens: PositiveInt = 16384  #: tokens of all of an episode's answers together
    #: refused questions after which an episode that goes on asking is ended, as env_timeout
    max_refused: PositiveInt = 100
