"""Plays and learns "nine errands, then the door" as a table: one run of scripts/errands_table.py.

    turn 0 … 9   a cue of eight is seen; at every turn but one, one of four boxes is opened, and
                 adds hidden luck of plus or minus sigma, of the task, the turn and the box
    the one      one of four doors is taken, and is worth 1 where it is the cue's
    end          luck and door are paid together

The best policy opens any boxes and takes the cue's door; luck has a mean of 0 over tasks. Policy,
critic and anchors see turn, cue and the door that was taken; a continuation starts from the whole
state, the luck so far included. Invariant: advantages are those of the project's estimators, a
token a turn; all sampled turns count, those of continuations too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch

from training.core_algos import call_adv_estimator, tree_weights

TURNS = 10
CUES = 8
BOXES = 4
DOORS = 4
ACTIONS = max(BOXES, DOORS)
# Tasks of a step, and episodes of a task.
TASKS = 16
GROUP = 8
# Branches of a state of a tree.
BRANCHES = 4
# How far the critic goes towards the returns of a step.
CRITIC_RATE = 0.3
GOAL = 0.9
ALGORITHM = SimpleNamespace(
    gamma=1.0, turn_gamma=1.0, turn_lam=1.0, gigpo_step_weight=1.0, norm_adv_by_std_in_grpo=True
)


@dataclass(frozen=True)
class Game:
    """Holds the game's numbers: the turn at which the door is taken, and the size of luck."""

    decision: int = TURNS - 1
    sigma: float = 8.0

    def state(self, turn: int, cue: np.ndarray, door: np.ndarray) -> np.ndarray:
        """Numbers what is seen: (episodes,) int64; `door` is -1 where none was taken."""
        return (turn * CUES + cue) * (DOORS + 1) + door + 1

    @property
    def states(self) -> int:
        """Counts the states that are seen."""
        return TURNS * CUES * (DOORS + 1)

    def success(self, policy: np.ndarray) -> float:
        """Computes the chance of taking the cue's door: policy is (states, actions)."""
        cues = np.arange(CUES)
        states = self.state(self.decision, cues, np.full(CUES, -1))
        return float(policy[states, cues % DOORS].mean())


@dataclass(frozen=True)
class Tasks:
    """Holds tasks: the cue of each, and the luck in each of its boxes.

    Attributes:
        cue: (tasks,) int64.
        luck: (tasks, TURNS, BOXES) float64; 0 at the turn of the door.
    """

    cue: np.ndarray
    luck: np.ndarray

    @classmethod
    def draw(cls, game: Game, generator: np.random.Generator, count: int) -> Tasks:
        """Draws tasks."""
        luck = game.sigma * generator.choice([-1.0, 1.0], size=(count, TURNS, ACTIONS))
        luck[:, game.decision] = 0.0
        return cls(cue=generator.integers(CUES, size=count), luck=luck)


@dataclass
class Played:
    """Holds what was played from a turn on, (episodes, TURNS) each; earlier turns are empty.

    Attributes:
        states, actions: int64.
        luck: (episodes, TURNS + 1) what had been collected before each turn, and at the end.
        door: (episodes, TURNS + 1) int64, the door that was taken before each turn, or -1.
        returns: (episodes,) what is paid at the end.
    """

    states: np.ndarray
    actions: np.ndarray
    luck: np.ndarray
    door: np.ndarray
    returns: np.ndarray


def play(
    game: Game,
    policy: np.ndarray,
    tasks: Tasks,
    task: np.ndarray,
    seeds: np.ndarray,
    turn: int = 0,
    luck: np.ndarray | None = None,
    door: np.ndarray | None = None,
) -> Played:
    """Plays from a turn on.

    Args:
        policy: (states, ACTIONS) chances.
        task: (episodes,) the number of each episode's task.
        seeds: (episodes, TURNS) numbers from 0 to 1, by which actions are drawn.
        turn, luck, door: where episodes start, with (episodes,) luck so far and door taken.
    """
    count = len(task)
    states = np.zeros((count, TURNS), dtype=np.int64)
    actions = np.zeros((count, TURNS), dtype=np.int64)
    lucks = np.zeros((count, TURNS + 1))
    doors = np.full((count, TURNS + 1), -1, dtype=np.int64)
    if luck is not None and door is not None:
        lucks[:, turn] = luck
        doors[:, turn] = door
    bounds = policy.cumsum(1)
    cue = tasks.cue[task]
    for now in range(turn, TURNS):
        states[:, now] = game.state(now, cue, doors[:, now])
        chosen = (seeds[:, now, None] >= bounds[states[:, now]]).sum(1)
        actions[:, now] = np.minimum(chosen, ACTIONS - 1)
        lucks[:, now + 1] = lucks[:, now] + tasks.luck[task, now, actions[:, now]]
        doors[:, now + 1] = actions[:, now] if now == game.decision else doors[:, now]
    returns = lucks[:, TURNS] + (doors[:, TURNS] == cue % DOORS)
    return Played(states, actions, lucks, doors, returns)


@dataclass
class Step:
    """Holds a step's rows: what is trained on, and how many turns were sampled for it.

    Attributes:
        played: of the rows. task: (rows,).
        trained: (rows, TURNS) bool.
        sampled: turns, those of continuations that are not trained on too.
        episodes: how many of the rows are episodes from the start.
        inputs: what the estimator reads beside rewards, mask and turns.
    """

    played: Played
    task: np.ndarray
    trained: np.ndarray
    sampled: int
    episodes: int
    inputs: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampler:
    """Samples steps of a game under a policy."""

    game: Game
    policy: np.ndarray
    generator: np.random.Generator

    def episodes(self, count: int, size: int = GROUP) -> tuple[Tasks, Step, np.ndarray]:
        """Plays `size` episodes of each of `count` tasks; returns their seeds too."""
        tasks = Tasks.draw(self.game, self.generator, count)
        task = np.repeat(np.arange(count), size)
        seeds = self.generator.random((len(task), TURNS))
        played = play(self.game, self.policy, tasks, task, seeds)
        trained = np.ones((len(task), TURNS), dtype=bool)
        return tasks, Step(played, task, trained, trained.size, len(task)), seeds

    def plain(self, count: int) -> Step:
        """Plays episodes alone."""
        return self.episodes(count)[1]

    def go_on(self, tasks: Tasks, step: Step, turn: int, copies: int = 1) -> Played:
        """Plays `copies` fresh continuations from the state before a turn of each row."""
        before = step.played
        task = np.repeat(step.task, copies)
        return play(
            self.game,
            self.policy,
            tasks,
            task,
            self.generator.random((len(task), TURNS)),
            turn=turn,
            luck=np.repeat(before.luck[:, turn], copies),
            door=np.repeat(before.door[:, turn], copies),
        )

    def vine(self, count: int) -> Step:
        """Plays one continuation from the state before every turn."""
        tasks, step, _ = self.episodes(count)
        returns = [self.go_on(tasks, step, turn).returns for turn in range(TURNS)]
        step.inputs["branch_returns"] = np.stack(returns, axis=1)[:, :, None].tolist()
        step.sampled += step.episodes * sum(TURNS - turn for turn in range(TURNS))
        return step

    def redraw(self, count: int) -> Step:
        """Draws every turn anew, and plays on with the episode's seeds where the action differs."""
        tasks, step, seeds = self.episodes(count)
        before = step.played
        returns = []
        for turn in range(TURNS):
            drawn = seeds.copy()
            drawn[:, turn] = self.generator.random(len(seeds))
            other = play(
                self.game,
                self.policy,
                tasks,
                step.task,
                drawn,
                turn=turn,
                luck=before.luck[:, turn],
                door=before.door[:, turn],
            )
            returns.append(other.returns)
            differs = other.actions[:, turn] != before.actions[:, turn]
            step.sampled += int(differs.sum()) * (TURNS - turn)
        step.inputs["branch_returns"] = np.stack(returns, axis=1)[:, :, None].tolist()
        return step

    def tree(self, count: int) -> Step:
        """Plays four branches from the start, and four from the state of the door's turn."""
        tasks, step, _ = self.episodes(count, BRANCHES)
        turn = self.game.decision
        others = self.go_on(tasks, step, turn, BRANCHES - 1)
        mains = step.episodes
        returns_of_others = others.returns.reshape(mains, BRANCHES - 1)
        lists: list[list[list[float]]] = []
        for row in range(mains):
            lists.append([[] for _ in range(TURNS)])
            lists[-1][turn] = returns_of_others[row].tolist()
        for row in range(mains):
            for branch in range(BRANCHES - 1):
                rest = np.delete(returns_of_others[row], branch).tolist()
                lists.append([[] for _ in range(TURNS)])
                lists[-1][turn] = [float(step.played.returns[row]), *rest]
        weights = tree_weights([BRANCHES if each == turn else 1 for each in range(TURNS)])
        trained = np.ones((len(lists), TURNS), dtype=bool)
        trained[mains:, :turn] = False
        return Step(
            played=_joined(step.played, others),
            task=np.concatenate([step.task, np.repeat(step.task, BRANCHES - 1)]),
            trained=trained,
            sampled=int(trained.sum()),
            episodes=mains,
            inputs={"branch_returns": lists, "turn_weights": [weights] * len(lists)},
        )


def _joined(one: Played, other: Played) -> Played:
    """Puts rows below rows."""
    columns = [np.concatenate([getattr(one, name), getattr(other, name)]) for name in vars(one)]
    return Played(*columns)


@dataclass(frozen=True)
class Arm:
    """Names what is compared: an estimator, how its steps are sampled, and what a task costs.

    Attributes:
        most_turns: that a task of a step may sample.
    """

    estimator: str
    sample: Callable[[Sampler, int], Step]
    most_turns: int

    @property
    def has_critic(self) -> bool:
        """Returns whether the estimator reads values."""
        return self.estimator == "turn_gae"


_EPISODES = GROUP * TURNS
_CONTINUATIONS = GROUP * TURNS * (TURNS + 1) // 2
ARMS: Mapping[str, Arm] = {
    "grpo": Arm("grpo", Sampler.plain, _EPISODES),
    "rloo": Arm("rloo", Sampler.plain, _EPISODES),
    "turn_return": Arm("turn_return", Sampler.plain, _EPISODES),
    "gigpo": Arm("gigpo", Sampler.plain, _EPISODES),
    "turn_gae": Arm("turn_gae", Sampler.plain, _EPISODES),
    "vine, a continuation of every turn": Arm("vine", Sampler.vine, _EPISODES + _CONTINUATIONS),
    "vine_redraw of every turn": Arm("vine_redraw", Sampler.redraw, _EPISODES + _CONTINUATIONS),
    "tree_grpo, 4 branches at turn 0 and at the door": Arm(
        "tree_grpo", Sampler.tree, BRANCHES * TURNS * BRANCHES
    ),
}


class Adam:
    """Moves the logits by Adam, upwards."""

    def __init__(self, shape: tuple[int, ...], rate: float) -> None:
        self.rate = rate
        self.mean = np.zeros(shape)
        self.square = np.zeros(shape)
        self.steps = 0

    def move(self, logits: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        """Returns the logits a step on."""
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * gradient**2
        mean = self.mean / (1 - 0.9**self.steps)
        square = self.square / (1 - 0.999**self.steps)
        return logits + self.rate * mean / (np.sqrt(square) + 1e-8)


@dataclass(frozen=True)
class Outcome:
    """Holds what came of a run.

    Attributes:
        success: the chance to take the cue's door, at the end.
        sampled: turns, continuations included.
        to_goal: turns that had been sampled when success first was 0.9; None: it never was.
        steps: updates.
    """

    success: float
    sampled: int
    to_goal: int | None
    steps: int


def train(game: Game, arm: Arm, *, budget: int, rate: float, seed: int) -> Outcome:
    """Learns until the next step could sample more than the budget has left.

    Args:
        budget: turns. rate: Adam's.
    """
    generator = np.random.default_rng(seed)
    logits = np.zeros((game.states, ACTIONS))
    values = np.zeros(game.states)
    adam = Adam(logits.shape, rate)
    sampled = 0
    to_goal = None
    success = game.success(softmax(logits))
    # The last step may have fewer tasks.
    while (count := min(TASKS, (budget - sampled) // arm.most_turns)) > 0:
        policy = softmax(logits)
        step = arm.sample(Sampler(game, policy, generator), count)
        sampled += step.sampled
        advantages, returns = estimate(arm.estimator, step, values)
        if arm.has_critic:
            _teach(values, step.played.states[step.trained], returns[step.trained])
        logits = adam.move(logits, _gradient(policy, step, advantages))
        success = game.success(softmax(logits))
        if to_goal is None and success >= GOAL:
            to_goal = sampled
    return Outcome(success, sampled, to_goal, adam.steps)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Turns logits into chances: (states, ACTIONS)."""
    chances = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(chances / chances.sum(1, keepdims=True))


def estimate(name: str, step: Step, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Runs an estimator of the project on a step: advantages and returns, (rows, TURNS) each."""
    rewards = np.zeros(step.trained.shape)
    rewards[:, -1] = step.played.returns
    mask = torch.from_numpy(step.trained)
    advantages, returns = call_adv_estimator(
        name,
        token_level_rewards=torch.from_numpy(rewards),
        response_mask=mask.long(),
        turn_ids=torch.where(mask, torch.arange(TURNS), -1),
        index=step.task,
        values=torch.from_numpy(values[step.played.states]),
        anchors=[[str(state) for state in row] for row in step.played.states.tolist()],
        config=ALGORITHM,
        **step.inputs,
    )
    return advantages.numpy(), returns.numpy()


def _teach(values: np.ndarray, states: np.ndarray, targets: np.ndarray) -> None:
    """Moves the critic's values towards the mean return of each state of the step."""
    sums = np.bincount(states, targets, len(values))
    counts = np.bincount(states, minlength=len(values))
    met = counts > 0
    values[met] += CRITIC_RATE * (sums[met] / counts[met] - values[met])


def _gradient(policy: np.ndarray, step: Step, advantages: np.ndarray) -> np.ndarray:
    """Differentiates the sum of advantages times log-probs by the logits, for each episode."""
    states = step.played.states[step.trained]
    actions = step.played.actions[step.trained]
    weights = advantages[step.trained] / step.episodes
    gradient = np.zeros(policy.shape)
    np.add.at(gradient, (states, actions), weights)
    gradient -= np.bincount(states, weights, len(policy))[:, None] * policy
    return gradient
