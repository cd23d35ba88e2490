"""The batch reward manager: a function scores all rows in one call."""

from typing import Any

from custom.coroutines import finished
from custom.env import BadRewardFunction, RewardFunctionRaised
from custom.env_calls import raised
from custom.model_errors import ModelError
from custom.reward_managers.naive import NaiveRewardManager, RewardSample
from custom.reward_managers.registry import register_reward_manager
from custom.reward_managers.unscored import Unscored


@register_reward_manager("batch")
class BatchRewardManager(NaiveRewardManager):
    """Scores all rows in one call, for functions that ask a server or run in parallel.

    compute_score(data_sources=, solution_strs=, ground_truths=, extra_infos=, **reward_kwargs)
    returns one result per row; each argument is a list. It has no default.
    """

    @staticmethod
    def check_config(config: Any) -> list[str]:
        """Lists what is missing in a config that names this manager."""
        if config.custom_reward_function.path is not None:
            return []
        return [
            "reward_model.reward_manager=batch needs custom_reward_function.path: a function that "
            "takes lists"
        ]

    def _score(self, samples: list[RewardSample]) -> list[Any]:
        try:
            answer = finished(
                self.compute_score(
                    data_sources=[sample.data_source for sample in samples],
                    solution_strs=[sample.solution_str for sample in samples],
                    ground_truths=[sample.ground_truth for sample in samples],
                    extra_infos=[sample.extra_info for sample in samples],
                    **self.reward_kwargs,
                )
            )
            results = list(answer)
        except ModelError as error:
            return [Unscored(str(error))] * len(samples)
        except Exception as error:
            raise RewardFunctionRaised(
                f"{self.score_name} failed with {raised(error, self.compute_score)} "
                f"on {len(samples)} rows; the first: {samples[0].describe()}"
            ) from error
        if len(results) != len(samples):
            raise BadRewardFunction(
                f"{self.score_name} returned {len(results)} results; "
                f"allowed: one per row, {len(samples)}"
            )
        return results
