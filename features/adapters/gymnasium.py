"""gymnasium's environments as games of text.

Invariant: an environment whose actions or observations cannot be written down is refused when it is
made, and an answer in which no action is found pays no more than the worst that play can pay.
"""

import random
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from custom.own_generators import OwnGenerators
from data.seeds import seed_beside
from features.adapters.base import Adapter, Step
from features.adapters.gymnasium_legends import Legend, legend_of
from features.adapters.gymnasium_spaces import ActionNames, name_actions, space_to_text

# How long random play looks for the worst reward: steps, and seconds of this thread's own
# computing.
TRIAL_STEPS = 300
TRIAL_SECONDS = 0.2
# The reward of an unreadable answer in a game that cannot be tried.
UNTRIED_REWARD = -1.0
# More numbers than this are told as a range, where they have no names.
MAX_LISTED_ACTIONS = 20


class GymnasiumEnvironment(Adapter):
    """Plays `gymnasium:ID`: discrete or text actions, an observation that can be written down.

    Args:
        identifier: such as "FrozenLake-v1", or "minigrid:MiniGrid-Empty-5x5-v0" for a game that a
            module registers when it is imported.
        prompt_template: fields {name}, {goal}, {observation}, {actions}.
        action_names: names of the actions in order; numbers are always understood, too.
        observation_names: names of the parts of an observation that is a Tuple or a row of numbers.
        goal: what the player is told to do; without it the rules of the game, written for
            gymnasium's own text games and otherwise taken from the environment's docstring, as are
            the names.
        invalid_reward: reward of an answer in which no action is found; the game does not move
            then. None: the worst that a step of this game can pay, if that is below 0, else 0
            (`worst_reward`).
        kwargs: go to gymnasium.make. Without a render_mode a text picture is the observation, where
            the environment has one ("ansi").
    An answer's last action counts, so that a model may think aloud before it: "not left, I go
    right" is right.
    """

    TEMPLATE = "{goal}\n\n{observation}\n\nActions: {actions}. Answer with one of them."

    def __init__(
        self,
        identifier: str,
        *,
        action_names: Sequence[str] | None = None,
        observation_names: Sequence[str] | None = None,
        goal: str | None = None,
        invalid_reward: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(identifier, kwargs)
        self.game = _make_game(identifier, self.settings)
        self.invalid_reward = invalid_reward
        # MiniGrid's games count their steps themselves.
        own_limit = getattr(self.game.unwrapped, "max_steps", None)
        self.max_turns = self.game.spec.max_episode_steps or own_limit
        legend = legend_of(self.game)
        if action_names is None:
            action_names = legend.actions
        if observation_names is None:
            observation_names = legend.observations
        self.picture = legend.picture
        self.goal = self._default_goal(legend) if goal is None else goal
        self.observation_names = list(observation_names)
        self.actions: ActionNames = name_actions(self.game.action_space, action_names)
        # Refuses, here and now, what cannot be written down.
        space = self.game.observation_space
        space_to_text(space, space.sample(), self.observation_names)

    def _default_goal(self, legend: Legend) -> str:
        if not self.max_turns:
            return legend.goal
        return f"{legend.goal} The game ends after {self.max_turns} actions at the latest."

    def start(self, seed: int) -> str:
        """Starts a new game and returns the prompt around its first observation."""
        observation, _ = self.game.reset(seed=seed)
        return self.fill_prompt(
            goal=self.goal, observation=self._show(observation), actions=self._action_list()
        )

    def play(self, action: str) -> Step:
        """Plays the last action that the text names."""
        choice = self.read_action(action)
        if choice is None:
            if self.invalid_reward is None:
                self.invalid_reward = worst_reward(self.game, self.name, self.settings)
            hint = f"I found no action in your answer. The actions are: {self._action_list()}."
            return hint, self.invalid_reward, False, {"valid": False}
        observation, reward, terminated, truncated, _ = self.game.step(choice)
        done = bool(terminated or truncated)
        return self._show(observation), float(reward), done, {"valid": True}

    def read_action(self, text: str) -> int | str | None:
        """Returns the last action that the text names; None where there is none.

        Where actions are text, the text itself is the action.
        """
        if self.actions.any_text:
            space = self.game.action_space
            choice = text.strip()[: space.max_length]
            return choice if space.contains(choice) else None
        # The longest first: "push left" before "left".
        names = sorted(self.actions.numbers, key=len, reverse=True)
        one_of_them = "|".join(map(re.escape, names))
        # A name within a word, or a number within another, is none.
        mentions = re.findall(rf"(?<![\w.-])(?:{one_of_them})(?![\w-]|\.\d)", text.lower())
        return self.actions.numbers[mentions[-1]] if mentions else None

    def sample_action(self, generator: random.Random) -> str:
        """Draws an action: its name, its number where it has none, or a text."""
        if self.actions.any_text:
            # The space's own generator has no part in the episode.
            self.game.action_space.seed(generator.randrange(2**31))
            return str(self.game.action_space.sample())
        number = generator.choice(list(self.actions.names))
        return self.actions.names[number] or str(number)

    def _show(self, observation: Any) -> str:
        if self.picture:
            return self.picture(self.game.unwrapped)
        if self.game.render_mode == "ansi":
            return _without_colours(str(self.game.render()))
        return space_to_text(self.game.observation_space, observation, self.observation_names)

    def _action_list(self) -> str:
        if self.actions.any_text:
            return "any text"
        names = self.actions.names
        if len(names) > MAX_LISTED_ACTIONS and not any(names.values()):
            return f"a number from {min(names)} to {max(names)}"
        return ", ".join(
            f"{number} ({name})" if name else str(number) for number, name in names.items()
        )


def _without_colours(picture: str) -> str:
    """Puts what a terminal would paint in brackets, and takes its control sequences out.

    Colours mark where the player stands.
    """
    bracketed = re.sub(r"\x1b\[[1-9][\d;]*m(.+?)\x1b\[0?m", r"[\1]", picture)
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", bracketed).strip("\n")


def _make_game(identifier: str, kwargs: Mapping[str, Any]) -> Any:
    """Makes the game, with its text picture where it has one and the config wants no other."""
    import gymnasium

    game = gymnasium.make(identifier, disable_env_checker=True, **kwargs)
    if "render_mode" in kwargs or "ansi" not in game.metadata.get("render_modes", ()):
        return game
    game.close()
    return _make_game(identifier, {**kwargs, "render_mode": "ansi"})


# --- What an unreadable answer costs ---


def worst_reward(game: Any, identifier: str, kwargs: Mapping[str, Any]) -> float:
    """Returns the worst reward that a step can pay, at most 0: no answer at all is no way out.

    It is read from the transition table where the game has one (`P`, gymnasium's toy texts), else
    it is the worst of some random episodes of a second game like this one; -1 where those cannot be
    played.
    """
    transitions = getattr(game.unwrapped, "P", None)
    try:
        if transitions is not None:
            rewards = _rewards_in_table(transitions)
        else:
            # The trial draws nothing from generators that the game may use.
            with OwnGenerators(0).installed():
                rewards = _rewards_of_trial(_make_game(identifier, kwargs))
        return min([0.0, *rewards])
    # A game may trip over being played at random, or over a second one beside it.
    except Exception:
        return UNTRIED_REWARD


def _rewards_in_table(transitions: Mapping[int, Mapping[int, Any]]) -> list[float]:
    """Returns the reward of each outcome: state -> action -> [(chance, state, reward, done)]."""
    rewards = []
    for moves in transitions.values():
        for outcomes in moves.values():
            for _, _, reward, _ in outcomes:
                rewards.append(float(reward))
    return rewards


def _rewards_of_trial(game: Any) -> list[float]:
    """Plays the game at random, and starts it anew where an episode ends."""
    from gymnasium.wrappers import Autoreset

    game = Autoreset(game)
    rewards: list[float] = []
    deadline = time.thread_time() + TRIAL_SECONDS
    game.reset(seed=0)
    game.action_space.seed(seed_beside(0, "actions"))
    while len(rewards) < TRIAL_STEPS and time.thread_time() < deadline:
        _, reward, *_ = game.step(game.action_space.sample())
        rewards.append(float(reward))
    game.close()
    return rewards
