"""The trial before a run: what does a game pay for random and for useless answers?

A policy learns whatever pays best. Where answers that nobody can read, or ending early, pay more
than play does, it learns that; so four simple players play a few episodes before a run trains on
them. Invariant: all players play the same tasks, and nothing that an environment raises in a trial
is raised by it, but for what ends the process; a reward function that fails is (BadRewardFunction).
"""

import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from custom.agent import Agent, as_user_messages
from custom.env import BadRewardFunction, Message, Task
from custom.env_calls import Abandoned, call_method, describe
from data.texts import printable

# Seconds after which no further episode begins, and a running one is dropped.
MAX_TRIAL_S = 10.0
# Answers of an environment's own that a trial keeps, and how much of each.
MAX_ACTIONS = 100
MAX_ACTION_CHARS = 1000
GARBAGE = ("zzz", "I would rather not say.", "?!", "", "The the the the the.")
# Their answers:
#   random     at random
#   garbage    what nobody can read
#   quitting   at random once, then garbage
#   cut        at random once, and then the response has no room for more
# All but garbage begin an episode with the same answer.
PLAYERS = ("random", "garbage", "quitting", "cut")


@dataclass(frozen=True)
class TrialOutcome:
    """Holds what one player got: means over its episodes that did not crash.

    Attributes:
        reward, turns: means.
        least, most: of an episode's rewards.
        episodes: how many were played, crashed ones included.
        crashes: how many of them crashed.
        error: what the first of those raised.
    """

    reward: float
    least: float
    most: float
    turns: float
    episodes: int
    crashes: int
    error: str


@dataclass(frozen=True)
class Trial:
    """Holds what came of a trial.

    Attributes:
        outcomes: by player; those for whom there was no time are left out.
        max_turns: the most turns that the game lasts by its own rules; None: unknown.
        differs: under one seed the game began differently, or answered the same first action
            differently.
        samples_actions: random answers were the environment's own (`sample_action`), not words of
            what it said.
        first_reply: the messages that answered a random player's first action; none where it
            crashed.
        sampled_actions: the different answers that were the environment's own, at most MAX_ACTIONS.
    """

    outcomes: dict[str, TrialOutcome]
    max_turns: int | None
    differs: bool
    samples_actions: bool
    first_reply: list[Message]
    sampled_actions: tuple[str, ...] = ()


@dataclass
class TrialEpisode:
    """Holds one episode of a player.

    Attributes:
        error: what was raised; empty where nothing was.
        first_messages: what the episode began with.
        first_reply: the messages that answered the first action.
        sampled_actions: the answers that were the environment's own.
    """

    reward: float = 0.0
    turns: int = 0
    error: str = ""
    first_messages: list[Message] = field(default_factory=list)
    first_reply: list[Message] = field(default_factory=list)
    sampled_actions: list[str] = field(default_factory=list)


def play_trial(
    agent: Agent, seed: int, episodes: int, max_turn: int, task: Task | None = None
) -> Trial:
    """Lets every player play `episodes` episodes of at most `max_turn` turns.

    Episode i has the seed `seed + i`, whoever plays it.
    """
    deadline = time.monotonic() + MAX_TRIAL_S
    episodes_of: dict[str, list[TrialEpisode]] = {player: [] for player in PLAYERS}
    differs = False
    # A seed at a time, so that each player has played something where time runs out.
    for number in range(episodes):
        of_this_seed: dict[str, TrialEpisode] = {}
        for player in PLAYERS:
            episode = _play_episode(
                agent,
                player,
                seed=seed + number,
                task=task,
                max_turn=max_turn,
                deadline=deadline,
            )
            if episode is not None:
                of_this_seed[player] = episode
                episodes_of[player].append(episode)
        differs = differs or _differ(of_this_seed)
    max_turns = getattr(agent.environment, "max_turns", None)
    random_episodes = episodes_of["random"]
    first_replies = [episode.first_reply for episode in random_episodes if episode.first_reply]
    actions = dict.fromkeys(
        action for episode in random_episodes for action in episode.sampled_actions
    )
    return Trial(
        outcomes={player: _outcome(played) for player, played in episodes_of.items() if played},
        max_turns=max_turns if isinstance(max_turns, int) else None,
        differs=differs,
        samples_actions=any(episode.sampled_actions for episode in random_episodes),
        first_reply=first_replies[0] if first_replies else [],
        sampled_actions=tuple(actions)[:MAX_ACTIONS],
    )


def _play_episode(
    agent: Agent, player: str, *, seed: int, task: Task | None, max_turn: int, deadline: float
) -> TrialEpisode | None:
    """Plays an episode; None where time runs out."""
    # Seeded by a text, so that it draws nothing that an environment's generator of `seed` draws.
    generator = random.Random(f"trial {seed}")
    if player == "cut":
        max_turn = 1
    episode = TrialEpisode()
    try:
        messages = agent.reset(seed, task)
        episode.first_messages = list(messages)
        done = False
        while not done and episode.turns < max_turn:
            if time.monotonic() > deadline:
                return None
            answer = _answer(player, episode, agent, generator, messages)
            result = agent.step(answer)
            messages = as_user_messages(result.observation)
            done = result.done
            episode.reward += result.reward
            episode.turns += 1
            if not episode.first_reply:
                episode.first_reply = list(messages)
        reward_of_episode = agent.episode_reward(_ending(player, done))
        if reward_of_episode is not None:
            episode.reward = reward_of_episode
    # A reward function's fault is none of the environment's.
    except (Abandoned, KeyboardInterrupt, BadRewardFunction):
        raise
    # Whatever else a user's code raises is what the trial is to find out.
    except BaseException as error:
        episode.error = describe(error)
    return episode


def _answer(
    player: str,
    episode: TrialEpisode,
    agent: Agent,
    generator: random.Random,
    messages: list[Message],
) -> str:
    """Returns what the player says in a turn, after the messages that came last.

    A random answer is the environment's `sample_action` where it has one, which the episode notes,
    else a word of the last message.
    """
    if player == "garbage" or (player == "quitting" and episode.turns > 0):
        return generator.choice(GARBAGE)
    action = call_method(agent.environment, "sample_action", generator)
    if action is not None:
        episode.sampled_actions.append(printable(str(action)[:MAX_ACTION_CHARS]))
        return str(action)
    words = re.findall(r"\w+", messages[-1]["content"]) if messages else []
    return generator.choice(words or ["hello"])


def _ending(player: str, done: bool) -> str:
    if done:
        return "done"
    if player == "cut":
        return "overflow"
    return "max_turns"


def _differ(episodes: Mapping[str, TrialEpisode]) -> bool:
    """Checks whether episodes of one seed, by player, began differently.

    They should not, nor should the reply to the first action differ, which is the same for all but
    garbage. Crashed ones say nothing.
    """
    beginnings = []
    replies = []
    for player, episode in episodes.items():
        if episode.error:
            continue
        beginnings.append(episode.first_messages)
        if player != "garbage":
            replies.append(episode.first_reply)
    return not (_all_equal(beginnings) and _all_equal(replies))


def _all_equal(conversations: Sequence[list[Message]]) -> bool:
    return all(conversation == conversations[0] for conversation in conversations)


def _outcome(episodes: Sequence[TrialEpisode]) -> TrialOutcome:
    errors = [episode.error for episode in episodes if episode.error]
    rewards_and_turns = [
        (episode.reward, episode.turns) for episode in episodes if not episode.error
    ]
    mean_reward = 0.0
    mean_turns = 0.0
    rewards = [reward for reward, _ in rewards_and_turns]
    if rewards_and_turns:
        mean_reward, mean_turns = np.mean(rewards_and_turns, axis=0).tolist()
    return TrialOutcome(
        reward=mean_reward,
        least=min(rewards, default=0.0),
        most=max(rewards, default=0.0),
        turns=mean_turns,
        episodes=len(episodes),
        crashes=len(errors),
        error=errors[0] if errors else "",
    )
