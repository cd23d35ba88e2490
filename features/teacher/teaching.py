"""A step's rows as the teacher reads them: its prompts before the same tokens, and its numbers.

    the policy's row     P0 P1 P2 | A0 A1 E0 A2        response_mask  1 1 0 1
    the teacher's        T0 T1 T2 T3 T4 | A0 A1 E0 A2  the same

The prompt alone is another one: what the policy sampled, and what answered it in the conversation,
stays as ids and in its columns, so that a token's two log-probs stand in one place. Invariant:
nothing is trained on that the policy did not sample; a row that is not taught keeps the advantage
of its reward and is 0 in `teacher_mask`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from custom.env import Message
from data.chat_templates import pad_token_id
from data.protocol import DataProto
from data.turn_tokens import TemplateRefusal, Tools, TurnTokens
from data.watchdog import beat
from features.teacher.contexts import TeacherFault, Telling
from features.teacher.keeper import TOLD
from features.teacher.losses import MASK, log_ratio_advantages
from features.teacher.row import Sibling, TeacherRow
from features.teacher.settings import ADVANTAGE, EMA, POLICY, TOP_K, TeacherSettings
from features.teacher.weights import (
    LOG_PROBS,
    NAME,
    POLICY_WORDS,
    QUESTION,
    TEACHER,
    TOP,
    WORD_LOG_PROBS,
    WORDS,
)
from training.batch.episode_rows import real_rows
from training.config import PPOConfig
from training.run.worker_group_protocol import PolicyGroup
from training.step_additions import Metrics, StepAddition, ask
from workers.model.builder import ModelSpec
from workers.turn_reading import turn_tokens

logger = logging.getLogger(__name__)
RAW_PROMPT = "raw_prompt"
# The column of what is known of episodes, of which a row has its own part.
FACTS = "episode_facts"
# Why a context may have nothing to tell.
NEEDS = {
    "hint": "it tells the text that a step's info[\"hint\"] had, or the task's column hint",
    "feedback": "it tells what the environment said last, and it said nothing",
    "sibling": "it tells a better answer of the group, and in each group all scored the same",
}


def open_addition(config: PPOConfig, tokenizer: Any) -> Teaching | None:
    """Opens the teacher's part of a step; None where the config has no teacher."""
    settings = config.section(TeacherSettings)
    return None if settings.model is None else Teaching(config, settings, tokenizer)


@dataclass(frozen=True)
class Taught:
    """Holds the rows that the teacher reads.

    Attributes:
        numbers: of the rows, in the step's.
        prompts: the teacher's, a list of ids each.
    """

    numbers: list[int]
    prompts: list[list[int]]


class Teaching(StepAddition):
    """Has the teacher score a step's rows, and adds what is learnt of it.

    Args:
        tokenizer: the policy's.
    """

    name = "teacher"

    def __init__(self, config: PPOConfig, settings: TeacherSettings, tokenizer: Any) -> None:
        self.config = config
        self.settings = settings
        self.tokenizer = tokenizer
        spec = self._spec(str(config.actor_rollout_ref.model.path))
        self.vocabulary = min(len(tokenizer), spec.hf_config.get_text_config().vocab_size)
        self.telling: Telling | None = None
        self.has_told_of_none = False
        if settings.context is not None:
            self.telling = Telling(settings.context)
            self.tokens: TurnTokens = turn_tokens(config, tokenizer, spec.eos_token_ids)
        if settings.model not in (POLICY, EMA):
            spec = self._spec(str(settings.model))
        self.longest: int = spec.hf_config.get_text_config().max_position_embeddings

    def _spec(self, path: str) -> ModelSpec:
        return ModelSpec(self.config.actor_rollout_ref.model, path, torch.device("cpu"))

    def add(self, rows: DataProto, policy: PolicyGroup) -> tuple[DataProto, Metrics]:
        """Returns the rows with the teacher's fields, or with its advantages, and metrics."""
        rows = rows.select()
        taught, metrics = self._taught(rows)
        rows.batch["advantages"] = self.settings.reward_coef * rows.batch["advantages"]
        fields = self._ask(rows, taught, policy)
        if self.settings.loss == ADVANTAGE:
            metrics |= self._add_advantages(rows, fields, policy)
        else:
            rows.batch.update(fields)
        return rows, metrics

    # Which rows are taught, and what the teacher reads of them.

    def _taught(self, rows: DataProto) -> tuple[Taught, Metrics]:
        """Chooses the rows, and makes their prompts; returns metrics."""
        numbers = []
        prompts = []
        told_nothing = 0
        left_out = 0
        episodes = StepEpisodes(rows)
        is_sampled = rows.batch["response_mask"].bool().any(dim=1) & real_rows(rows)
        for number in is_sampled.nonzero().flatten().tolist():
            failed = episodes.of_row(number) < self.settings.failed_below
            if self.settings.where == "failed" and not failed:
                continue
            beat("the teacher's prompts")
            prompt = self._prompt(rows, number, episodes, failed)
            if prompt is None:
                told_nothing += 1
                continue
            if not self._fits(rows, number, prompt):
                left_out += 1
                continue
            numbers.append(number)
            prompts.append(prompt)
        if told_nothing and not numbers and not left_out:
            self._warn_of_none(told_nothing)
        lengths = [len(prompt) for prompt in prompts]
        metrics = {
            "teacher/rows": len(numbers) / max(int(is_sampled.sum()), 1),
            "teacher/too_long": float(left_out),
        }
        if lengths:
            metrics["teacher/prompt_tokens/mean"] = sum(lengths) / len(lengths)
            metrics["teacher/prompt_tokens/max"] = float(max(lengths))
        return Taught(numbers, prompts), metrics

    def _warn_of_none(self, told_nothing: int) -> None:
        """Logs, once, that a step taught no row."""
        if self.has_told_of_none:
            return
        self.has_told_of_none = True
        logger.warning(
            "teacher.context=%s has nothing to tell of any of the step's %d rows, so that none is "
            "taught; %s (teacher/rows shows it in later steps)",
            self.settings.context,
            told_nothing,
            NEEDS.get(str(self.settings.context), "the function returned None for each"),
        )

    def _prompt(
        self, rows: DataProto, number: int, episodes: StepEpisodes, failed: bool
    ) -> list[int] | None:
        """Returns the ids of the teacher's prompt; None: it is told nothing of this row."""
        if self.telling is None:
            return _real(rows, number, slice(None, rows.batch["prompts"].shape[1]))
        source = self._source(rows, number, episodes)
        row = TeacherRow(
            messages=[dict(message) for message in source.messages],
            answer=self._answer(rows, number),
            score=episodes.of_row(number),
            failed=failed,
            columns={
                # The function may change what it is given.
                name: deepcopy(column[number])
                for name, column in rows.non_tensor_batch.items()
                if name != FACTS
            },
            texts=dict(source.texts),
            feedback=source.feedback,
            ending=str(rows.non_tensor_batch.get("ending", [""] * len(rows))[number]),
            number=episodes.row_in_episode(number),
            siblings=self._siblings(rows, number, episodes),
        )
        messages = self.telling.messages(row)
        if messages is None:
            return None
        try:
            return self.tokens.history(messages, source.tools).prompt()
        except TemplateRefusal as error:
            raise TeacherFault(
                f"teacher.context={self.telling.name} returned messages that the chat template "
                f"refuses: {error}; change their roles or order"
            ) from error

    def _fits(self, rows: DataProto, number: int, prompt: Sequence[int]) -> bool:
        """Checks whether the teacher's model has room for the prompt and the row's tokens.

        Raises:
            TeacherFault: it has not, and `teacher.too_long` is refuse.
        """
        width = rows.batch["responses"].shape[1]
        tokens = int(rows.batch["attention_mask"][number, -width:].sum())
        if len(prompt) + tokens <= self.longest:
            return True
        if self.settings.too_long == "leave_out":
            return False
        raise TeacherFault(
            f"the teacher's prompt has {len(prompt)} tokens, and {tokens} follow it, and its model "
            f"reads {self.longest}: let teacher.context={self.settings.context} tell less, or set "
            "teacher.too_long=leave_out, which leaves such rows untaught"
        )

    def _answer(self, rows: DataProto, number: int) -> str:
        """Returns the text of what the policy sampled in a row."""
        sampled = rows.batch["response_mask"][number].bool()
        return self.tokens.text(rows.batch["responses"][number][sampled].tolist())

    def _siblings(
        self, rows: DataProto, number: int, episodes: StepEpisodes
    ) -> tuple[Sibling, ...]:
        """Lists the other episodes of a row's group."""
        own = episodes.episode[number]
        return tuple(
            Sibling(self._answer(rows, episodes.last_row[other]), episodes.score[other])
            for other in episodes.of_group(number)
            if other != own
        )

    def _source(self, rows: DataProto, number: int, episodes: StepEpisodes) -> Source:
        """Returns what a row's prompt was rendered from, and what is known of its episode.

        Raises:
            TeacherFault: nobody knows.
        """
        columns = rows.non_tensor_batch
        told = episodes.facts(number).get(TOLD)
        place = episodes.row_in_episode(number)
        if told is not None and told["sources"][place] is not None:
            source = told["sources"][place]
            return Source(source["messages"], source["tools"], told["texts"], told["feedback"])
        if told is None and RAW_PROMPT in columns:
            messages = columns[RAW_PROMPT][number]
            return Source(list(messages), None, {}, "")
        raise TeacherFault(
            f"teacher.context={self.settings.context} needs the messages of a row's prompt, which "
            "are not known of this one: programs' requests, and rows of a trainer of your own, "
            "keep none; set teacher.context=null"
        )

    # What the teacher says of them.

    def _ask(self, rows: DataProto, taught: Taught, policy: PolicyGroup) -> dict[str, Tensor]:
        """Returns the teacher's fields of all rows, 0 where they are not taught."""
        mask = rows.batch["response_mask"]
        fields = {MASK: torch.zeros_like(mask), LOG_PROBS: torch.zeros(mask.shape)}
        words = 0
        if self.settings.loss == TOP_K:
            words = min(self.settings.top_k, self.vocabulary)
            fields[WORDS] = torch.zeros((*mask.shape, words), dtype=torch.int32)
            fields[WORD_LOG_PROBS] = torch.zeros((*mask.shape, words))
        if not taught.numbers:
            return fields
        places = torch.tensor(taught.numbers)
        asked = rows.select_idxs(places)
        question = behind_prompts(asked, taught.prompts, pad_token_id(self.tokenizer))
        question.meta_info = rows.meta_info | {QUESTION: TEACHER}
        if words and self.settings.divergence == "forward_kl":
            question.meta_info[TOP] = words
        elif words:
            own = asked.select(list(question.tensors()), ["uid"])
            own.meta_info = rows.meta_info | {QUESTION: POLICY_WORDS, TOP: words}
            question.batch[WORDS] = ask(policy, NAME, own).batch[WORDS]
            fields[WORDS][places] = question.batch[WORDS]
        answer = ask(policy, NAME, question)
        for name, values in answer.tensors().items():
            fields[name][places] = values.to(fields[name].dtype)
        fields[MASK][places] = mask[places]
        return fields

    def _add_advantages(
        self, rows: DataProto, fields: Mapping[str, Tensor], policy: PolicyGroup
    ) -> Metrics:
        """Adds the teacher's advantages to the rows'; returns metrics."""
        mask = fields[MASK].bool()
        if not mask.any():
            return {}
        log_probs = rows.batch.get("old_log_probs", None)
        if log_probs is None:
            log_probs = policy.compute_log_prob(rows).batch["old_log_probs"]
        added = log_ratio_advantages(
            log_probs, fields[LOG_PROBS], mask, self.settings.max_log_ratio
        )
        rows.batch["advantages"] = rows.batch["advantages"] + self.settings.coef * added
        scored = added[mask]
        return {
            "teacher/kl": -scored.mean().item(),
            "teacher/advantage": scored.abs().mean().item() * self.settings.coef,
        }


@dataclass(frozen=True)
class Source:
    """Holds what a row's prompt was rendered from, and what its episode was told."""

    messages: list[Message]
    tools: Tools
    texts: Mapping[str, str]
    feedback: str


class StepEpisodes:
    """Knows a step's episodes: which rows are whose, and what they scored.

    Attributes:
        episode: of each row, its name.
        score: of each episode, the sum of `token_level_scores` over its rows.
        last_row: of each episode.
    """

    def __init__(self, rows: DataProto) -> None:
        columns = rows.non_tensor_batch
        self.rows = rows
        names = columns.get("episode_id", range(len(rows)))
        self.episode = [str(name) for name in names]
        self.score: dict[str, float] = defaultdict(float)
        self.last_row: dict[str, int] = {}
        self._groups: dict[Any, list[str]] = defaultdict(list)
        self._facts: dict[str, Mapping[str, Any]] = {}
        # They stand in the episode's first row, wherever that lies.
        for name, facts in zip(self.episode, columns.get(FACTS, ()), strict=False):
            if facts is not None:
                self._facts[name] = facts
        paid = rows.batch["token_level_scores"].sum(dim=1).tolist()
        for number in real_rows(rows).nonzero().flatten().tolist():
            name = self.episode[number]
            self.score[name] += paid[number]
            before = self.last_row.get(name)
            if before is None:
                self._groups[columns["uid"][number]].append(name)
            if before is None or self.row_in_episode(number) > self.row_in_episode(before):
                self.last_row[name] = number

    def of_row(self, number: int) -> float:
        """Returns the score of a row's episode."""
        return self.score[self.episode[number]]

    def facts(self, number: int) -> Mapping[str, Any]:
        """Returns the facts of a row's episode; none of an answer to a prompt."""
        return self._facts.get(self.episode[number], {})

    def row_in_episode(self, number: int) -> int:
        """Returns the number of a row in its episode."""
        column = self.rows.non_tensor_batch.get("episode_row")
        return 0 if column is None else int(column[number])

    def of_group(self, number: int) -> list[str]:
        """Lists the episodes of a row's group."""
        return self._groups[self.rows.non_tensor_batch["uid"][number]]


def behind_prompts(rows: DataProto, prompts: Sequence[Sequence[int]], pad: int) -> DataProto:
    """Puts each row's response behind another prompt; what a forward pass reads.

    Prompts are padded on the left, as all are. A response keeps its columns, mask and padding.
    """
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), pad, dtype=rows.batch["prompts"].dtype)
    response_width = rows.batch["responses"].shape[1]
    real = rows.batch["attention_mask"][:, -response_width:]
    attended = real.new_zeros(len(prompts), width)
    for number, prompt in enumerate(prompts):
        ids[number, width - len(prompt) :] = torch.tensor(prompt, dtype=ids.dtype)
        attended[number, width - len(prompt) :] = 1
    return DataProto.from_dict(
        tensors={
            "prompts": ids,
            "responses": rows.batch["responses"],
            "response_mask": rows.batch["response_mask"],
            "attention_mask": torch.cat([attended, real], dim=1),
        },
        non_tensors={"uid": rows.non_tensor_batch["uid"]},
    )


def _real(rows: DataProto, number: int, part: slice) -> list[int]:
    """Lists the ids of a part of a row, without padding."""
    ids = torch.cat([rows.batch["prompts"][number], rows.batch["responses"][number]])[part]
    kept = rows.batch["attention_mask"][number, part].bool()
    found: list[int] = ids[kept].tolist()
    return found
