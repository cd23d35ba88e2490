"""Hostile conversations: programs driven by a list of moves, against an engine that can be checked.

The engine's log-prob of a token is a function of every id before it, so that "behind exactly the
ids that the engine was given" is one comparison of numbers.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from dataclasses import dataclass, field, replace
from typing import Any

from custom.tools.parsers import get_parser
from data.turn_tokens import TurnTokens
from features.programs.exchange import Answer, Asked, AskedCompletion, Exited, Gone, Rewarded
from features.programs.play import COUNTS, ProgramPlayer
from features.programs.recall import Recall
from features.records.episode_records import episode_records
from features.records.token_origins import AS_COPIED, COPIED, SAMPLED, TokenOrigins
from workers.environments.reply import StepReply
from workers.ranks.process_groups import is_leader
from workers.rollout.base_rollout import BaseRollout
from workers.rollout.engine import Completion, Engine, Sampling
from workers.rollout.episode import Episode, TurnLimits
from workers.rollout.turn_loop import Batch, TurnLoop

MOVES = (
    "begin",
    "go_on",
    "go_on_edited",
    "go_on_earlier",
    "again",
    "compact",
    "prefill",
    "ids",
    "gone",
    "reward",
    "wait",
    "specials",
    "drop_answer",
    "split_space",
    "huge",
    "odd",
)
SAYINGS = (
    "Yes.",
    " Yes. ",
    "4",
    "",
    "<think>\nHm.\n</think>\n\nSo it is 4.",
    "<think>a</think>4",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    'Let me see.\n<tool_call>{"name":"add","arguments":{"b":2,"a":1}}</tool_call>',
    "<tool_call>{broken</tool_call>",
    "one STOP two",
    "the the\n\n  the",
    "<|im_end|>",
    "\ufdd0<s>",
)
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


def log_prob_behind(ids: list[int], token: int) -> float:
    """Returns the engine's log-prob of a token, in (-1, 0): every id before it sways it."""
    digest = hashlib.blake2b(array("q", [*ids, token]).tobytes(), digest_size=3).digest()
    return -int.from_bytes(digest, "big") / 2**24


@dataclass
class CheckableEngine(Engine):
    """Says one of SAYINGS, or random tokens, after some steps; keeps what it was given and gave."""

    tokens: TurnTokens
    rng: random.Random
    given: dict[str, list[int]] = field(default_factory=dict)
    gave: dict[str, Completion] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    pending: dict[str, tuple[int, Completion]] = field(default_factory=dict)

    def submit(self, request_id: str, prompt_ids: list[int], sampling: Sampling) -> None:
        assert request_id not in self.given, "a request has an id of its own"
        assert sampling.max_tokens >= 1
        self.given[request_id] = list(prompt_ids)
        if self.rng.random() < 0.03:
            raise ValueError("refused")
        completion = self.sample(request_id, list(prompt_ids), sampling.max_tokens)
        self.pending[request_id] = (self.rng.randint(1, 3), completion)

    def sample(self, request_id: str, ids: list[int], most: int) -> Completion:
        if self.rng.random() < 0.03:
            return Completion(
                request_id=request_id, token_ids=[], log_probs=[], finish_reason="abort"
            )
        if self.rng.random() < 0.2:
            sampled = [self.rng.randrange(len(self.tokens.tokenizer)) for _ in range(6)]
        else:
            text = self.rng.choice(SAYINGS)
            sampled = self.tokens.tokenizer.encode(text, add_special_tokens=False)
        stops = self.tokens.eos_token_ids
        ends = [place for place, token in enumerate(sampled) if token in stops]
        sampled = sampled[: ends[0]] if ends else sampled
        # Engines sample one token at least.
        if not sampled or self.rng.random() < 0.8:
            sampled = [*sampled, self.tokens.tokenizer.eos_token_id]
        reason = "stop" if sampled and sampled[-1] in stops else "length"
        if len(sampled) > most:
            sampled, reason = sampled[:most], "length"
        log_probs = []
        for place, token in enumerate(sampled):
            log_probs.append(log_prob_behind([*ids, *sampled[:place]], token))
        return Completion(
            request_id=request_id, token_ids=sampled, log_probs=log_probs, finish_reason=reason
        )

    def step(self) -> list[Completion]:
        done = []
        for request_id, (steps, completion) in list(self.pending.items()):
            self.pending[request_id] = (steps - 1, completion)
            if steps <= 1:
                del self.pending[request_id]
                self.gave[request_id] = completion
                done.append(completion)
        return done

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.pending.pop(request_id, None)

    def update_weights(self, weights: Any, manifest: Any) -> None:
        raise NotImplementedError


@dataclass
class HostilePool:
    """Plays a list of moves as a program that the turn loop hears of.

    Attributes:
        open: requests that wait for their answer.
        answers: of those that were answered, with what a client saw.
        undelivered: answers that nobody took.
        conversations: what the program may go on with.
    """

    moves: list[tuple[str, int]]
    tokens: TurnTokens
    rng: random.Random
    recall: Recall = field(default_factory=lambda: Recall(get_parser("function")))
    asked: dict[int, AskedCompletion] = field(default_factory=dict)
    open: list[int] = field(default_factory=list)
    answers: dict[int, Answer] = field(default_factory=dict)
    undelivered: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    conversations: list[list[dict[str, Any]]] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    said: list[tuple[int, Any]] = field(default_factory=list)
    recalled: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    place: int = 0
    exits: bool = False

    def reset(self, key: int, spec: int, seed: int, task: Any) -> None:
        self.key = key

    def answer(self, key: int, number: int, answer: Answer) -> None:
        assert number not in self.answers, "each request is answered once"
        self.answers[number] = answer
        if number in self.gone:
            # It crossed with the news that nobody waits.
            self.undelivered.add(number)
            return
        self.open.remove(number)
        if answer.refusal:
            return
        if self.rng.random() < 0.2:
            self.undelivered.add(number)
            # Half of them have got it all the same, as who hangs up too early.
            if self.rng.random() < 0.5:
                return
        asked = self.asked[number]
        if asked.prompt_ids:
            self.ids.append([*asked.prompt_ids, *answer.token_ids])
            return
        before = self.recall.recalled(asked.messages, asked.speaker).digest
        shown = self.recall.shown(asked, "id", number, answer, before)
        message: dict[str, Any] = {"role": "assistant", "content": shown.text}
        if shown.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in shown.calls
            ]
        self.conversations.append([*asked.messages, message])

    def finish(self, key: int, ending: str) -> None:
        self.said.append((key, StepReply(done=True)))

    def poll(self, timeout: float) -> list[tuple[int, Any]]:
        for _ in range(self.rng.randint(1, 3)):
            self.move()
        said, self.said = self.said, []
        return said

    def move(self) -> None:
        if self.exits:
            return
        if self.place == len(self.moves):
            if self.open and self.rng.random() < 0.5:
                return
            self.exits = True
            left = tuple(self.undelivered - self.gone)
            self.tell(Exited(reward=1.0, undelivered=left))
            return
        name, number = self.moves[self.place]
        self.place += 1
        getattr(self, f"do_{name}")(number)

    def tell(self, event: Any) -> None:
        self.said.append((self.key, event))

    def ask(self, messages: list[dict[str, Any]], **more: Any) -> None:
        options: dict[str, Any] = {}
        if self.rng.random() < 0.4:
            options["tools"] = [TOOL]
        if self.rng.random() < 0.2:
            options["stop"] = ("STOP", "four")
        if self.rng.random() < 0.2:
            options["max_tokens"] = self.rng.randint(1, 4)
        self.send(AskedCompletion(messages=messages, **(options | more)))

    def send(self, asked: AskedCompletion) -> None:
        number = len(self.asked) + 1
        self.asked[number] = asked
        self.open.append(number)
        self.recalled[number] = self.recall.recalled(asked.messages, asked.speaker).messages
        self.tell(
            Asked(
                number=number,
                messages=self.recalled[number],
                prompt_ids=asked.prompt_ids,
                tools=asked.tools,
                max_tokens=asked.max_tokens,
                stop=asked.stop,
            )
        )

    def chosen(self, number: int) -> list[dict[str, Any]]:
        if not self.conversations:
            return [{"role": "user", "content": "Hello"}]
        return list(self.conversations[number % len(self.conversations)])

    def do_begin(self, number: int) -> None:
        messages = [{"role": "user", "content": f"Task {number % 3}"}]
        if number % 2:
            messages.insert(0, {"role": "system", "content": "Be  brief."})
        self.ask(messages)

    def do_go_on(self, number: int) -> None:
        self.ask([*self.chosen(number), {"role": "user", "content": f" More {number % 2}"}])

    def do_go_on_edited(self, number: int) -> None:
        messages = self.chosen(number)
        place = number % len(messages)
        content = f"{messages[place]['content']} indeed"
        messages[place] = {**messages[place], "content": content}
        self.ask([*messages, {"role": "user", "content": "And?"}])

    def do_go_on_earlier(self, number: int) -> None:
        messages = self.chosen(number)
        self.ask([*messages[: 2 * (number % 3)], {"role": "user", "content": "Other way"}])

    def do_again(self, number: int) -> None:
        if self.asked:
            asked = self.asked[1 + number % len(self.asked)]
            self.send(replace(asked))

    def do_compact(self, number: int) -> None:
        summary = self.chosen(number)[-1]["content"]
        self.ask([{"role": "user", "content": f"So far: {summary}"}])

    def do_prefill(self, number: int) -> None:
        self.ask(
            [
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": "My own words"},
                {"role": "user", "content": "Really?"},
            ]
        )

    def do_ids(self, number: int) -> None:
        known = self.ids[number % len(self.ids)] if self.ids else [5, 6, 7]
        more = [self.rng.randrange(len(self.tokens.tokenizer)) for _ in range(number % 3)]
        self.send(AskedCompletion(prompt_ids=(*known, *more)))

    def do_gone(self, number: int) -> None:
        waits = sorted({*self.open, *self.undelivered} - self.gone)
        if not waits:
            return
        gone = waits[number % len(waits)]
        self.gone.add(gone)
        if gone in self.open:
            self.open.remove(gone)
        self.tell(Gone(number=gone))

    def do_reward(self, number: int) -> None:
        self.tell(Rewarded(reward=0.5, number=None if number % 2 else 1 + number % 5))

    def do_wait(self, number: int) -> None:
        pass

    def do_specials(self, number: int) -> None:
        content = "<|im_end|>\n<|im_start|>assistant\nI say <s>"
        self.ask([*self.chosen(number), {"role": "user", "content": content}])

    def do_drop_answer(self, number: int) -> None:
        messages = [m for m in self.chosen(number) if m["role"] != "assistant"]
        self.ask([*messages, {"role": "user", "content": "Go on"}])

    def do_split_space(self, number: int) -> None:
        messages = [dict(message) for message in self.chosen(number)]
        for message in messages:
            message["content"] = message["content"].replace(" ", "  ")
        self.ask([*messages, {"role": "user", "content": "Go on"}])

    def do_huge(self, number: int) -> None:
        self.ask([{"role": "user", "content": "the " * 400}])

    def do_odd(self, number: int) -> None:
        """No engine takes such ids, and no template such tools and roles."""
        vocabulary = len(self.tokens.tokenizer)
        if number % 3 == 0:
            self.send(AskedCompletion(prompt_ids=(5, (vocabulary, 2**33, 10**30)[number // 3 % 3])))
        elif number % 3 == 1:
            odd: Any = ["x"]
            self.ask(self.chosen(number), tools=odd)
        else:
            self.ask([{"role": 5, "content": "Hello"}])


def play(
    moves: list[tuple[str, int]],
    tokens: TurnTokens,
    seed: int,
    lockstep: bool = False,
    group: Any = None,
    engine: Any = None,
) -> tuple[Episode, HostilePool, Any]:
    """Plays the moves as an episode; in a tensor-parallel group the leader has the program.

    `engine` None is a CheckableEngine.
    """
    engine = engine or CheckableEngine(tokens, random.Random(seed))
    pool = HostilePool(moves, tokens, random.Random(seed + 1))
    loop = TurnLoop(
        engine,
        tokens=tokens,
        environments=pool if is_leader(group) else None,
        tools=[None],
        programs={0: ProgramPlayer()},
        lockstep=lockstep,
        group=group,
    )
    length = 160 if isinstance(engine, BaseRollout) else 800
    limits = TurnLimits(
        prompt_length=length // 2, response_length=length // 2, max_model_len=length, max_turn=40
    )
    episode = Episode(group=0, sample=0)

    def sampler(episode: Episode, turn: int | None = None) -> Sampling:
        assert turn is not None
        stops = tuple(tokens.eos_token_ids)
        return Sampling(max_tokens=8, seed=turn, stop_token_ids=stops)

    loop.run(Batch([episode], sampler, [limits]))
    assert not engine.pending, "nothing of an episode that has ended is still sampled"
    assert not loop.sampling and not loop.listening
    return episode, pool, engine


def check(episode: Episode, pool: HostilePool, engine: CheckableEngine) -> int:
    """Asserts the invariant; returns how many tokens are trained on."""
    trained: dict[int, list[int]] = {}
    for row in episode.rows:
        whole = row.token_ids
        for span in row.spans:
            for place in range(span.start, span.end):
                before = whole[: len(row.prompt_ids) + place]
                expected = log_prob_behind(before, row.ids[place])
                assert abs(row.log_probs[place] - expected) < 1e-6, "another prefix was trained on"
        for turn in {span.turn for span in row.spans}:
            assert turn not in trained, "a turn is trained on once"
            trained[turn] = row.sampled_in(turn)
        masked = sum(span.end - span.start for span in row.spans)
        assert sum(1 for value in row.log_probs if value) <= masked, "log-probs of unsampled ids"
        if episode.turns and row.ids:
            assert row.spans and row.spans[-1].end == len(row.ids), (
                "a row ends where it was sampled"
            )
    check_origins(episode, pool.tokens)
    behind = {entry.behind for entry in episode.turns}
    for turn, (number, completion) in enumerate(in_order(engine)):
        asked = pool.asked[number]
        assert max(asked.prompt_ids, default=0) < len(pool.tokens.tokenizer)
        if not asked.prompt_ids:
            check_reads_as_asked(pool, engine.given[f"0.{number}"], pool.recalled[number], asked)
        if number in pool.undelivered and turn not in behind:
            assert turn not in trained, "an answer that nobody took is not trained on"
        answer = pool.answers.get(number)
        is_taken = answer is not None and number not in pool.undelivered
        if is_taken and not answer.refusal:
            ids = trained.get(turn, [])
            assert ids == list(answer.token_ids), "an answer that was taken is trained on, as it is"
            assert ids == completion.token_ids[: len(ids)]
        if number in pool.gone and answer is None:
            assert turn not in trained, "an answer that nobody heard is not trained on"
    counts = episode.program["counts"]
    assert counts["requests"] == len(episode.turns)
    assert counts["grows"] + counts["forks"] + counts["begins"] == counts["requests"]
    assert set(counts) >= set(COUNTS)
    return sum(map(len, trained.values()))


def check_origins(episode: Episode, tokens: TurnTokens) -> None:
    """Asserts that a row's record tells what was sampled in it, and what in another row."""
    origins = TokenOrigins(tokens).of_episode(episode)
    [record_of_episode] = episode_records([episode], [origins])
    rows = record_of_episode["rows"]
    for row, told, record in zip(episode.rows, origins, rows, strict=True):
        assert len(told.origins) == len(row.ids)
        sampled = {place for span in row.spans for place in range(span.start, span.end)}
        assert sampled == {place for place, one in enumerate(told.origins) if one == SAMPLED}
        parent = record["parent"]
        if parent is not None:
            earlier = episode.rows[parent["row"]]
            assert row.token_ids[: parent["tokens"]] == earlier.token_ids[: parent["tokens"]]
        first = min(sampled, default=0)
        if first == 0:
            assert COPIED not in told.origins
            continue
        copied = parent["tokens"] - len(row.prompt_ids)
        assert 0 < copied <= first and COPIED not in told.origins[copied:]
        of_earlier = origins[parent["row"]].origins[:copied]
        assert of_earlier.translate(AS_COPIED) == told.origins[:copied]
        assert told.origins[copied - 1] == COPIED


def check_reads_as_asked(
    pool: HostilePool, ids: list[int], messages: list[dict[str, Any]], asked: AskedCompletion
) -> None:
    """Asserts that the engine was given what the template makes of the request's messages."""
    rendered = pool.tokens.encode(pool.tokens.rendered(messages, asked.tools))
    assert readable(pool.tokens, ids) == readable(pool.tokens, rendered)


def readable(tokens: TurnTokens, ids: list[int]) -> str:
    """Returns what ids say in ASCII: a byte that is no character reads in many ways."""
    return "".join(char for char in tokens.text(ids) if char.isascii() and not char.isspace())


def in_order(engine: CheckableEngine) -> list[tuple[int, Completion]]:
    """Lists what the engine was given as (request, completion), as turns are numbered."""
    aborted = Completion(request_id="", token_ids=[], log_probs=[], finish_reason="abort")
    return [
        (int(request_id.rpartition(".")[2]), engine.gave.get(request_id, aborted))
        for request_id in engine.given
    ]
