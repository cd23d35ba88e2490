"""reasoning-gym's generated tasks as environments.

Invariant: a task is judged by its own verifier, as in `custom.reward_score`, so that both give the same score.
"""

from typing import Any

import numpy as np

from custom.adapters.base import Adapter, Step, import_library
from custom.reward_score import extract_answer


class ReasoningGymEnvironment(Adapter):
    """Plays `reasoning_gym:NAME`: a generated task, judged by its own verifier; the seed chooses the task.

    Args:
        identifier: a dataset, such as "chain_sum".
        prompt_template: fields {name}, {question}.
        attempts: answers that may be given; after a wrong one the player is told so, and tries again.
        kwargs: the dataset's own settings, such as min_terms.
    The reward is the verifier's score of the last answer; what of a text is the answer, `extract_answer` says.
    """

    TEMPLATE = "{question}"

    def __init__(self, identifier: str, *, prompt_template: str = TEMPLATE, attempts: int = 1, **kwargs: Any) -> None:
        super().__init__(identifier, prompt_template)
        self.library = import_library("reasoning_gym", identifier)
        self.attempts, self.settings = attempts, kwargs
        self._new_task(0)

    def reset(self, seed: int | None = None) -> str:
        """Generates a new task and returns the prompt around its question."""
        self._new_task(int(np.random.default_rng().integers(2**31)) if seed is None else seed)
        self.attempts_left = self.attempts
        return self.fill_prompt(question=self.entry["question"])

    def step(self, action: str) -> Step:
        """Scores the answer; the episode ends with a right one or the last attempt."""
        self.attempts_left -= 1
        score = float(self.task.score_answer(extract_answer(action, str(self.entry["answer"])), self.entry))
        self._done = score >= 1 or self.attempts_left <= 0
        if self._done:
            return "Correct." if score >= 1 else "That is not right.", score, True, {"score": score}
        return f"That is not right. Attempts left: {self.attempts_left}.", 0.0, False, {"score": score}

    def _new_task(self, seed: int) -> None:
        try:
            self.task = self.library.create_dataset(self.name, size=1, seed=seed, **self.settings)
        except (ValueError, TypeError, AssertionError) as error:
            raise ValueError(f"reasoning_gym:{self.name} cannot be made with {self.settings}: {error}") from error
        self.entry = self.task[0]
