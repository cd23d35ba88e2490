"""The settings of branching: where continuations begin, how many, and what they are for."""

from collections.abc import Iterator
from typing import Final, Literal

from training.config.section import NonNegativeInt, PositiveInt, Section

NEVER: Final = "never"
# A sentence names at most so many turns.
MOST_SHOWN = 20
MOST_TURNS = 1000
Place = Literal["never", "every", "random", "last", "entropy"]
State = Literal["proved", "snapshot", "copy", "replay"]


class BranchingSettings(Section):
    """Says at which turns of an episode its state is continued from more than once."""

    #: never, every, random (one turn, drawn), last, entropy (one turn, drawn in proportion to how
    #: unsure the policy was), or numbers of turns, as [0, 4], the first being 0
    at: tuple[NonNegativeInt | Place, ...] = (NEVER,)
    samples: PositiveInt = 4  #: continuations of each such state
    #: how a state is had again: by the environment's snapshot() and restore(bytes), by a copy of
    #: it, by playing the turns before it again; proved = the first that holds in a trial
    state: State = "proved"
    #: same = the environment's luck to come is the episode's; fresh = it is drawn anew for each
    #: continuation, by the environment's reseed(seed)
    luck: Literal["same", "fresh"] = "same"
    #: whether continuations are trained on, too, weighted so that the expected gradient stays that
    #: of the episodes; with the estimators vine and tree_grpo
    train: bool = False
    #: fresh = a continuation's turns are sampled anew; common = its first turn alone is, the others
    #: with the episode's seeds; null = common with vine_redraw, else fresh
    random_numbers: Literal["fresh", "common"] | None = None
    #: also the first turn's state is continued from where rollout.n is above 1, and the group's
    #: other episodes are continuations of it already
    first_turn: bool = False
    #: the most tokens that a continuation samples, as which it overflows; null = no bound of its
    #: own
    max_tokens: PositiveInt | None = None
    max_state_mb: PositiveInt = 16  #: a larger state of an environment is refused, and counted
    trial_episodes: PositiveInt = 2  #: of each environment, on which a state is proved
    seed: NonNegativeInt = 0  #: of the turns that are drawn

    @property
    def is_on(self) -> bool:
        """Returns whether there are continuations."""
        return self.at != (NEVER,)

    @property
    def numbered(self) -> tuple[int, ...]:
        """Returns the numbers of turns, where `at` names some."""
        return tuple(place for place in self.at if isinstance(place, int))

    @property
    def places(self) -> str:
        """Returns `at` as sentences name it."""
        words = [str(place) for place in self.at]
        if len(words) > MOST_SHOWN:
            words = [*words[:MOST_SHOWN], "…"]
        return ",".join(words)

    def problems(self) -> Iterator[str]:
        """Yields that `at` is neither one word nor a list of numbers, or a list without end."""
        if len(self.at) > MOST_TURNS:
            yield (
                f"branching.at=[{self.places}] names {len(self.at):,} turns; allowed: "
                f"{MOST_TURNS}; every takes all that are played"
            )
        if len(self.at) == 1 or (self.at and len(self.numbered) == len(self.at)):
            return
        yield (
            f"branching.at=[{self.places}] must be one word, such as every, or a list of turns, "
            "as [0, 4], the first being 0"
        )
