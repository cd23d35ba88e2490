"""The settings of the sampler `difficulty`: which tasks are worth their tokens."""

from collections.abc import Iterator

from training.config.section import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Section


class DifficultySettings(Section):
    """Draws tasks that the policy neither always nor never solves; data.sampler.name=difficulty.

    The settings may stand beside the name, too: data.sampler.explore is difficulty.explore.
    """

    #: the lowest and the highest share of a task's episodes that solve it, between which it is apt
    solve_rate: tuple[Fraction, Fraction] = (0.1, 0.9)
    solved_reward: float = 0.5  #: an episode that is paid at least this has solved its task
    #: a task is apt, too, where the rewards of its groups have this standard deviation or more;
    #: null = solve_rate alone decides
    min_spread: PositiveFloat | None = None
    #: share of a step's groups that play tasks which are not apt, so that each comes again
    explore: Fraction = 0.1
    #: groups in which a task is played before its numbers count; until then it is new, and drawn
    #: as apt ones are
    min_visits: PositiveInt = 1
    #: what a group counts once its task is played again: 0 = nothing, 1 = as much as the latest
    decay: Fraction = 0.7
    #: environments without rows: the tasks are these many seeds, from 0; null = with several
    #: entries of env_template the entries alone
    seeds: PositiveInt | None = None
    forget: bool = False  #: begin a resumed run with an empty memory
    #: tasks in the table of the run's page, those that took the most tokens; 0 = no table
    table_tasks: NonNegativeInt = 200

    def problems(self) -> Iterator[str]:
        """Yields that the bounds leave no task between them."""
        low, high = self.solve_rate
        if low > high:
            yield (
                f"difficulty.solve_rate=[{low}, {high}] has the higher bound first: write the "
                "lower one first"
            )
