"""reasoning-gym's generated tasks as environments.

Invariant: a task is judged by its own verifier, through `custom.reward_score`, so that a dataset's
row and an episode get the same score; a verifier that trips over an answer scores it 0.
"""

import random
from typing import Any

from custom.own_generators import OwnGenerators
from custom.reward_score import NUMBER, extract_answer
from custom.verifier_process import judge
from features.adapters.base import Adapter, Step

# A sampled answer has at most so many digits.
MAX_DIGITS = 18
MAX_WORDS = 50


class ReasoningGymEnvironment(Adapter):
    """Plays `reasoning_gym:NAME`: a generated task, judged by its own verifier.

    The seed chooses the task.

    Args:
        identifier: a dataset, such as "chain_sum".
        prompt_template: fields {name}, {question}.
        kwargs: the dataset's own settings, such as min_terms; composite's `datasets` as a list of
            {name: chain_sum, weight: 1, config: {min_terms: 2}}.
    The reward is the verifier's score of the one answer; `extract_answer` finds the answer in a
    text. Where the verifier raised, `info["error"]` says how. Some datasets draw from the global
    generators: each task is generated with its own. A few (word_ladder, ransom_note, …) go by the
    order of a set of strings, so that equal seeds give other tasks in a process with another
    PYTHONHASHSEED.
    """

    TEMPLATE = "{question}"
    max_turns = 1

    def __init__(self, identifier: str, **kwargs: Any) -> None:
        super().__init__(identifier, kwargs)
        if identifier == "composite":
            from reasoning_gym.composite import DatasetSpec

            datasets = self.settings.get("datasets", [])
            self.settings["datasets"] = [DatasetSpec(**dataset) for dataset in datasets]
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
        answer = extract_answer(action, str(self.entry["answer"]))
        score, error = judge(self.task.score_answer, answer, self.entry)
        info: dict[str, Any] = {"score": score}
        if error:
            info["error"] = error
        reply = "Correct." if score >= 1 else "That is not right."
        return reply, score, True, info

    def sample_action(self, generator: random.Random) -> str:
        """Returns an answer of the truth's kind.

        That is a number about as long, or as many words of the question.
        """
        truth = str(self.entry["answer"]).strip()
        if NUMBER.fullmatch(truth):
            whole_digits = truth.lstrip("-").partition(".")[0]
            return str(generator.randrange(10 ** min(len(whole_digits), MAX_DIGITS)))
        words = str(self.entry["question"]).split() or ["nothing"]
        count = min(max(len(truth.split()), 1), MAX_WORDS)
        return " ".join(generator.choices(words, k=count))
