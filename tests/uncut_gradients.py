"""The update of uncut trees, written out by hand: no rows, no packing, nothing of the core.

Every turn's log-probs come from a pass of the plain transformers model over its path alone, in
float64. A batch is then a flat list of sampled tokens, episode by episode in the order of turns;
advantages are loops over numbers, and a loss is one line a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.uncut_trees import Episode

Numbers = np.ndarray


@dataclass
class Reading:
    """What a policy makes of the N sampled tokens: (N,) each."""

    log_probs: Tensor
    entropies: Tensor
    squares: Tensor


def read_policy(lm: nn.Module, episodes: list[Episode]) -> Reading:
    """Runs the model over the path of each leaf; a token's numbers are those of its own path."""
    columns: list[list[Tensor]] = [[], [], []]
    for episode in episodes:
        by_turn: dict[int, tuple[Tensor, ...]] = {}
        for leaf in episode.leaves():
            ids, answers = episode.path(leaf)
            logits = lm(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            for turn, place in answers.items():
                states = logits[place.start - 1 : place.stop - 1]
                chosen = states[torch.arange(len(states)), torch.tensor(ids[place])]
                entropy = -(states.exp() * states).sum(-1)
                by_turn.setdefault(turn, (chosen, entropy, states.exp().square().sum(-1)))
        for turn in range(len(episode.turns)):
            for column, numbers in zip(columns, by_turn[turn], strict=True):
                column.append(numbers)
    return Reading(*(torch.cat(column) for column in columns))


def read_values(transformer: nn.Module, episodes: list[Episode]) -> Tensor:
    """The values of the states before the sampled tokens: (N,)."""
    column = []
    for episode in episodes:
        by_turn: dict[int, Tensor] = {}
        for leaf in episode.leaves():
            ids, answers = episode.path(leaf)
            values = transformer(input_ids=torch.tensor([ids])).logits[0, :, 0]
            for turn, place in answers.items():
                by_turn.setdefault(turn, values[place.start - 1 : place.stop - 1])
        column += [by_turn[turn] for turn in range(len(episode.turns))]
    return torch.cat(column)


def engine_log_probs(
    log_probs: Tensor, episodes: list[Episode]
) -> tuple[Tensor, dict[tuple[str, int], Tensor]]:
    """The engine's log-probs, which are off by a little: (N,), and by episode and turn."""
    by_turn = {}
    place = 0
    for episode in episodes:
        for number, turn in enumerate(episode.turns):
            length = len(turn.sampled)
            own = log_probs[place : place + length].detach()
            noisy = (own + torch.tensor(turn.engine_noise)).clamp(max=-1e-3)
            # Both sides read the same float32 numbers.
            by_turn[episode.name, number] = noisy.float()
            place += length
    return torch.cat(list(by_turn.values())).double(), by_turn


@dataclass(eq=False)
class Line:
    """An episode's sampled tokens in the order of turns, as numbers: (its tokens,) each."""

    episode: Episode
    places: slice
    turns: Numbers
    rewards: Numbers
    values: Numbers
    old: Numbers
    ref: Numbers
    squares: Numbers

    @property
    def score(self) -> float:
        return float(self.rewards.sum())

    @property
    def length(self) -> int:
        return len(self.turns)

    def turn_rewards(self) -> Numbers:
        turns = len(self.episode.turns)
        return np.array([self.rewards[self.turns == k].sum() for k in range(turns)])


def lines_of(episodes: list[Episode], **numbers: Tensor) -> list[Line]:
    """Cuts flat numbers (old, ref, values, squares) into lines; rewards lie on a turn's end."""
    lines = []
    start = 0
    for episode in episodes:
        turns: list[int] = []
        rewards: list[float] = []
        for number, turn in enumerate(episode.turns):
            turns += [number] * len(turn.sampled)
            rewards += [0.0] * (len(turn.sampled) - 1) + [turn.reward]
        places = slice(start, start + len(turns))
        start = places.stop
        own = {name: column[places].detach().numpy() for name, column in numbers.items()}
        lines.append(
            Line(
                episode=episode,
                places=places,
                turns=np.array(turns),
                rewards=np.array(rewards),
                **own,
            )
        )
    return lines


# Estimators


@dataclass(frozen=True)
class Knobs:
    """The settings that estimators read."""

    gamma: float = 0.9
    lam: float = 0.8
    turn_gamma: float = 0.7
    turn_lam: float = 0.6
    step_weight: float = 0.5
    role_means: dict[str, float] = field(default_factory=lambda: {"role 0": 0.4, "role 1": -0.3})


KNOBS = Knobs()
# Of each line, advantages and returns.
Made = list[tuple[Numbers, Numbers]]


def discounted(rewards: Numbers, gamma: float) -> Numbers:
    returns = np.zeros(len(rewards))
    ahead = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        ahead = rewards[t] + gamma * ahead
        returns[t] = ahead
    return returns


def gae(rewards: Numbers, values: Numbers, gamma: float, lam: float) -> Numbers:
    made = np.zeros(len(rewards))
    ahead = next_value = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        ahead = rewards[t] + gamma * next_value - values[t] + gamma * lam * ahead
        next_value = values[t]
        made[t] = ahead
    return made


def whitened(made: Made) -> Made:
    flat = np.concatenate([advantages for advantages, _ in made])
    scale = 1 / np.sqrt(flat.var(ddof=1) + 1e-8)
    return [((advantages - flat.mean()) * scale, returns) for advantages, returns in made]


def others_of(line: Line, lines: list[Line]) -> list[Line]:
    """The lines of the same group, the line itself among them."""
    return [other for other in lines if other.episode.group == line.episode.group]


def by_score(of_group: Callable[[Line, list[Line]], float]) -> Callable[[list[Line]], Made]:
    """An estimator that gives an episode one number, from its group's scores."""

    def estimate(lines: list[Line]) -> Made:
        made = []
        for line in lines:
            number = np.full(line.length, of_group(line, others_of(line, lines)))
            made.append((number, number))
        return made

    return estimate


def std(numbers: list[float]) -> float:
    return float(np.std(numbers, ddof=1))


def scores(group: list[Line]) -> list[float]:
    return [line.score for line in group]


def normalised(value: float, values: list[float]) -> float:
    return (value - float(np.mean(values))) / (std(values) + 1e-6)


def grpo(line: Line, group: list[Line]) -> float:
    return normalised(line.score, scores(group))


def rloo(line: Line, group: list[Line]) -> float:
    others = [other.score for other in group if other is not line]
    # Of a group of which nothing else is left.
    return line.score - float(np.mean(others)) if others else 0.0


def passk(line: Line, group: list[Line]) -> float:
    best, second = sorted(scores(group))[:-3:-1]
    return (best - second) / (std(scores(group)) + 1e-6) if line.score == best else 0.0


def opo(line: Line, group: list[Line]) -> float:
    weighted = sum(other.length * other.score for other in group)
    return line.score - weighted / sum(other.length for other in group)


def maxrl(line: Line, group: list[Line]) -> float:
    counted_from = min(0.0, min(scores(group)))
    mean = float(np.mean(scores(group))) - counted_from
    return (line.score - counted_from - mean) / mean


def gdpo(line: Line, group: list[Line]) -> float:
    total = 0.0
    for kind, weight in (("acc", 1.0), ("form", 0.5)):
        values = [other.episode.infos[kind] for other in group]
        total += weight * normalised(line.episode.infos[kind], values)
    return total


def of_gpg(lines: list[Line]) -> Made:
    scale = len(lines) / sum(line.score != 0 for line in lines)
    mean = by_score(lambda line, group: (line.score - float(np.mean(scores(group)))) * scale)
    return mean(lines)


def of_gae(lines: list[Line]) -> Made:
    made = []
    for line in lines:
        advantages = gae(line.rewards, line.values, KNOBS.gamma, KNOBS.lam)
        made.append((advantages, advantages + line.values))
    return whitened(made)


def of_turn_gae(lines: list[Line]) -> Made:
    made = []
    for line in lines:
        rewards = line.turn_rewards()
        before = np.array([line.values[line.turns == k][0] for k in range(len(rewards))])
        targets = gae(rewards, before, KNOBS.turn_gamma, KNOBS.turn_lam) + before
        advantages = np.zeros(line.length)
        for k, target in enumerate(targets):
            inside = line.turns == k
            own = line.rewards[inside].copy()
            own[-1] += target - rewards[k]
            advantages[inside] = gae(own, line.values[inside], KNOBS.gamma, KNOBS.lam)
        made.append((advantages, advantages + line.values))
    return whitened(made)


def of_reinforce_plus_plus(lines: list[Line]) -> Made:
    returns = [discounted(line.rewards, KNOBS.gamma) for line in lines]
    return whitened([(numbers, numbers) for numbers in returns])


def of_remax(lines: list[Line]) -> Made:
    made = []
    for line in lines:
        returns = discounted(line.rewards, 1.0)
        made.append((returns - line.episode.baseline, returns))
    return made


def of_rae(lines: list[Line]) -> Made:
    means = KNOBS.role_means
    return by_score(lambda line, _: line.score - means[line.episode.role])(lines)


def of_optimal_baseline(lines: list[Line]) -> Made:
    """A mean for each place, counted in sampled tokens, weighed by what could vary up to there."""
    weights = [np.cumsum(1 - 2 * np.exp(line.old) + line.squares) for line in lines]
    returns = [discounted(line.rewards, 1.0) for line in lines]
    made = []
    for number, line in enumerate(lines):
        group = [i for i, other in enumerate(lines) if other in others_of(line, lines)]
        advantages = returns[number].copy()
        for t in range(line.length):
            left = [i for i in group if lines[i].length > t]
            if len(left) > 1:
                total = sum(weights[i][t] for i in left) + 1e-8
                advantages[t] -= sum(returns[i][t] * weights[i][t] for i in left) / total
        made.append((advantages, returns[number]))
    return made


def turn_returns(line: Line) -> Numbers:
    return discounted(line.turn_rewards(), KNOBS.turn_gamma)


def of_turn_return(lines: list[Line]) -> Made:
    made = []
    for line in lines:
        own = turn_returns(line)
        advantages = own.copy()
        for k in range(len(own)):
            group = [turn_returns(other) for other in others_of(line, lines) if other is not line]
            reached = [returns[k] for returns in group if len(returns) > k]
            if reached:
                advantages[k] -= np.mean(reached)
        made.append((advantages[line.turns], own[line.turns]))
    return made


def of_gigpo(lines: list[Line]) -> Made:
    made = []
    for line in lines:
        group = others_of(line, lines)
        own = turn_returns(line)
        advantages = np.full(len(own), grpo(line, group))
        for k, turn in enumerate(line.episode.turns):
            alike = []
            for other in group:
                returns = turn_returns(other)
                states = [t.state for t in other.episode.turns]
                alike += [returns[j] for j, state in enumerate(states) if state == turn.state]
            if len(alike) > 1:
                advantages[k] += KNOBS.step_weight * normalised(own[k], alike)
        made.append((advantages[line.turns], own[line.turns]))
    return made


def of_distillation(lines: list[Line]) -> Made:
    made = []
    for line in lines:
        advantages = 0.8 * (line.ref - line.old) + rloo(line, others_of(line, lines))
        made.append((advantages, advantages))
    return made


ESTIMATORS: dict[str, Callable[[list[Line]], Made]] = {
    "gae": of_gae,
    "turn_gae": of_turn_gae,
    "grpo": by_score(grpo),
    "grpo_vectorized": by_score(grpo),
    "grpo_passk": by_score(passk),
    "rloo": by_score(rloo),
    "rloo_vectorized": by_score(rloo),
    "reinforce_plus_plus": of_reinforce_plus_plus,
    "reinforce_plus_plus_baseline": lambda lines: whitened(
        by_score(lambda line, group: line.score - float(np.mean(scores(group))))(lines)
    ),
    "remax": of_remax,
    "opo": by_score(opo),
    "gpg": of_gpg,
    "maxrl": by_score(maxrl),
    "gdpo": lambda lines: whitened(by_score(gdpo)(lines)),
    "rae": of_rae,
    "tir_optimal_token_baseline": of_optimal_baseline,
    "turn_return": of_turn_return,
    "gigpo": of_gigpo,
    "on_policy_distillation": of_distillation,
}


# Losses of a token, and how they become one number


@dataclass
class Tokens:
    """What losses read of the N tokens, (N,) each: `new` has a gradient."""

    new: Tensor
    old: Tensor
    advantages: Tensor
    engine: Tensor

    @property
    def ratio(self) -> Tensor:
        return (self.new - self.old).exp()


def vanilla(t: Tokens) -> Tensor:
    worse = torch.maximum(-t.advantages * t.ratio, -t.advantages * t.ratio.clamp(0.8, 1.3))
    return torch.where(t.advantages < 0, torch.minimum(worse, -t.advantages * 3.0), worse)


def plain(t: Tokens) -> Tensor:
    return -t.advantages * t.new


def cispo(t: Tokens) -> Tensor:
    return -t.advantages * t.ratio.detach().clamp(0.8, 1.3) * t.new


def sapo(t: Tokens) -> Tensor:
    tau = torch.where(t.advantages > 0, 1.0, 1.05)
    return -t.advantages * torch.sigmoid(tau * (t.ratio - 1)) * 4 / tau


def dppo(t: Tokens, kept: Tensor) -> Tensor:
    return torch.where(kept, -t.advantages * t.ratio.detach().clamp(max=3.0) * t.new, 0)


def dppo_tv(t: Tokens) -> Tensor:
    moved = t.new.detach().exp() - t.old.exp()
    return dppo(t, torch.where(t.advantages > 0, moved <= 0.3, moved >= -0.2))


def dppo_kl(t: Tokens) -> Tensor:
    new, old = t.new.detach().exp(), t.old.exp()
    kl = old * (old / new).log() + (1 - old) * ((1 - old + 1e-8) / (1 - new + 1e-8)).log()
    up = (kl <= 0.3) | (new <= old)
    down = (kl <= 0.2) | (new >= old)
    return dppo(t, torch.where(t.advantages > 0, up, down))


def dro(t: Tokens) -> Tensor:
    return -t.advantages * t.new + 0.25 * (t.new - t.old).square()


LOSSES: dict[str, Callable[[Tokens], Tensor]] = {
    "vanilla": vanilla,
    "gpg": plain,
    "reinforce": plain,
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
}


def one_number(
    per_token: Tensor, lines: list[Line], mode: str, mask: Tensor, scale: float
) -> Tensor:
    """Sums or averages over tokens, or over episodes; `mask` (N,) says which tokens are left."""
    kept = torch.where(mask, per_token, 0)
    if mode == "token-sum":
        return kept.sum()
    if mode == "token-mean":
        return kept.sum() / mask.sum()
    totals = []
    for line in lines:
        tokens = mask[line.places].sum()
        if tokens:
            total = kept[line.places].sum()
            totals.append(total / tokens if mode == "seq-mean-token-mean" else total)
    mean = torch.stack(totals).mean()
    return mean / scale if mode == "seq-mean-token-sum-norm" else mean


def flat(made: Made, which: int) -> Tensor:
    """Advantages (0) or returns (1) of all lines: (N,)."""
    return torch.from_numpy(np.concatenate([numbers[which] for numbers in made]))


def gradient(loss: Tensor, module: nn.Module) -> Tensor:
    """The gradient of a module's weights, in one line."""
    parameters = list(module.parameters())
    found: Any = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    columns = []
    for parameter, grad in zip(parameters, found, strict=True):
        columns.append(torch.zeros_like(parameter) if grad is None else grad)
    return torch.cat([column.flatten() for column in columns])
