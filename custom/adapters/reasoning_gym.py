"""reasoning-gym's generated tasks as environments.

Invariant: a task is judged by its own verifier, through `custom.reward_score`, so that a dataset's row and an episode
get the same score; a verifier that trips over an answer scores it 0.
"""

import random
from typing import Any

from custom.adapters.base import Adapter, Step
from custom.env import OwnGenerators
from custom.reward_score import NUMBER, extract_answer, judge


class ReasoningGymEnvironment(Adapter):
    """Plays `reasoning_gym:NAME`: a generated task, judged by its own verifier; the seed chooses the task.

    Args:
        identifier: a dataset, such as "chain_sum".
        prompt_template: fields {name}, {question}.
        kwargs: the dataset's own settings, such as min_terms; composite's `datasets` as a list of
            {name: chain_sum, weight: 1, config: {min_terms: 2}}.
    The reward is the verifier's score of the one answer; what of a text is the answer, `extract_answer` says. Where
    the verifier raised, `info["error"]` says how. Some datasets draw from the global generators: each task is generated
    with its own. A few (word_ladder, ransom_note, …) go by the order of a set of strings, so that equal seeds give
    other tasks in a process with another PYTHONHASHSEED.
    """

    TEMPLATE, max_turns = "{question}", 1

    def __init__(self, identifier: str, **kwargs: Any) -> None:
        super().__init__(identifier, kwargs)
        if identifier == "composite":
            from reasoning_gym.composite import DatasetSpec

            self.settings["datasets"] = [
                DatasetSpec(**spec) for spec in self.settings.get("datasets", [])
            ]
        self.start(0)

    def start(self, seed: int) -> str:
        """Generates a new task and returns the prompt around its question."""
        import reasoning_gym

        with OwnGenerators(seed).installed():
            self.task = reasoning_gym.create_dataset(self.name, size=1, seed=seed, **self.settings)
            self.entry = self.task[0]
        return self.fill_prompt(question=str(self.entry["question"]))

    def play(self, action: str) -> Step:
        """Scores the answer, and ends the episode."""
        score, error = judge(
            self.task.score_answer, extract_answer(action, str(self.entry["answer"])), self.entry
        )
        info: dict[str, Any] = {"score": score} | ({"error": error} if error else {})
        return "Correct." if score >= 1 else "That is not right.", score, True, info

    def sample_action(self, generator: random.Random) -> str:
        """Returns an answer of the truth's kind: a number about as long, or as many words of the question."""
        truth = str(self.entry["answer"]).strip()
        if NUMBER.fullmatch(truth):
            return str(generator.randrange(10 ** min(len(truth.lstrip("-").partition(".")[0]), 18)))
        words = str(self.entry["question"]).split() or ["nothing"]
        return " ".join(generator.choices(words, k=min(max(len(truth.split()), 1), 50)))
