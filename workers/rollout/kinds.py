"""Kinds of episodes: who plays, as a config or a program of a user's says, and how.

    config   kind.named(config)         what plays where the config names nothing else
             kind.owns(config, choice)  whether an environment of the config is of this kind
    spec     kind.make_spec             how its episodes are played, as data that goes to workers
    driver   kind.trial                 what is tried before a model is loaded
    worker   kind.open_pool             what plays beside the engine
             kind.player                who says what is sampled next (episode_play.py)

A kind is one registration: an `EpisodeKind` that a feature names in its `Feature.kinds`, or that a
spec of a user's own names as its `kind`. Invariant: this file imports nothing that plays; what a
kind does is named as "module:function" and imported where a run asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from data.loading import load_object
from training.features import features

if TYPE_CHECKING:
    from training.config.schema.agent import EnvironmentChoice
    from training.config.schema.ppo import CoreConfig
    from workers.rollout.episode import Player

# Those of the core, which come after the features'.
CORE_KINDS = (
    "workers.rollout.environment_kind:DATASET_ROW",
    "workers.rollout.environment_kind:ENVIRONMENT",
)


class EpisodeSpec(Protocol):
    """Describes how a kind's episodes are played: data that pickles.

    Attributes:
        kind: "module:NAME" of the `EpisodeKind`.
        source: what messages and metrics are named after.
        max_turn, max_turn_tokens: limits of its own; None: the config's.
    """

    kind: ClassVar[str]

    @property
    def source(self) -> Any: ...
    @property
    def max_turn(self) -> int | None: ...
    @property
    def max_turn_tokens(self) -> int | None: ...


def names_nothing(config: CoreConfig) -> EnvironmentChoice | None:
    """Says that the config has no setting that would have this kind play."""
    return None


def owns_nothing(config: CoreConfig, choice: EnvironmentChoice) -> bool:
    """Says that no environment of a config is of this kind."""
    return False


@dataclass(frozen=True, kw_only=True)
class EpisodeKind:
    """Registers a kind of episodes; functions are named as "module:function".

    Attributes:
        name: what messages call it.
        open_pool: (config, the kind's specs, tokens of the longest row, queue of replies or None)
            -> what plays them, see workers/environments/reply.py:Pool; it numbers the specs as they
            come, and has `tool_schemas` and `shutdown`.
        make_spec: (config, choice) -> EpisodeSpec. None: specs are made by whoever trains.
        named: config -> what plays by settings of the kind's own; None: they name nothing.
        owns: (config, choice) -> whether an environment of the config is of this kind.
        player: spec -> Player, where episodes ask for turns themselves. None: `play_episode`.
        trial: (config, the kind's specs, tokens, task) -> sentences on what keeps a run from
            beginning.
        check: (key, choice, config, own_data) -> sentences on what is wrong with an environment's
            settings, whose section is called `key`; `own_data`: users pass objects.
        check_reward: (config, function) -> sentences on a reward function of the user's.
        names_speakers: its rows may be those of several agents, whom it names.
    """

    name: str
    open_pool: str
    make_spec: str | None = None
    named: Callable[[CoreConfig], EnvironmentChoice | None] = names_nothing
    owns: Callable[[CoreConfig, EnvironmentChoice], bool] = owns_nothing
    player: str | None = None
    trial: str | None = None
    check: str | None = None
    check_reward: str | None = None
    names_speakers: bool = False

    def load(self, place: str) -> Any:
        """Returns one of the functions that the kind names."""
        return load_object(place, f"episodes of kind {self.name}")


@cache
def kinds() -> tuple[EpisodeKind, ...]:
    """Lists the kinds that a config may name, the features' first."""
    places = [place for feature in features().values() for place in feature.kinds]
    return tuple(load_object(place, "kind of episodes") for place in (*places, *CORE_KINDS))


def named_choice(config: CoreConfig) -> EnvironmentChoice | None:
    """Returns what plays by the settings of the first kind that says so; None: nothing does."""
    for kind in kinds():
        choice = kind.named(config)
        if choice is not None:
            return choice
    return None


def kind_of_choice(config: CoreConfig, choice: EnvironmentChoice) -> EpisodeKind | None:
    """Returns the kind that an environment of the config is of; None: none that is here."""
    return next((kind for kind in kinds() if kind.owns(config, choice)), None)


def kind_of(spec: EpisodeSpec) -> EpisodeKind:
    """Returns the kind of a spec.

    Raises:
        TypeError: the spec names none.
    """
    place = getattr(spec, "kind", None)
    if not isinstance(place, str):
        raise TypeError(
            f"{spec!r} names no kind of episodes: give a spec with kind='MODULE:NAME', such as an "
            "AgentSpec"
        )
    kind: EpisodeKind = load_object(place, f"the kind of {type(spec).__name__}")
    return kind


def by_kind(specs: Sequence[EpisodeSpec]) -> Iterator[tuple[EpisodeKind, list[int]]]:
    """Yields each kind of the specs with the numbers of those that are of it, in their order."""
    numbers: dict[str, list[int]] = {}
    for number, spec in enumerate(specs):
        kind_of(spec)
        numbers.setdefault(spec.kind, []).append(number)
    for of_kind in numbers.values():
        yield kind_of(specs[of_kind[0]]), of_kind


def players(specs: Sequence[EpisodeSpec]) -> dict[int, Player]:
    """Returns who plays those specs whose kinds have a player of their own, by their numbers."""
    found: dict[int, Player] = {}
    for kind, numbers in by_kind(specs):
        if kind.player is not None:
            make_player = kind.load(kind.player)
            found |= {number: make_player(specs[number]) for number in numbers}
    return found
