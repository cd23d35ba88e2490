"""An episode of a program, as a coroutine that the turn loop resumes: requests become turns.

    reset -> Asked -> Sample -> Completion -> answer -> Asked ... -> Exited -> finish

Several requests may be on their way at the same time; each is a turn of the episode, in whichever
row it goes on (conversations.py). Invariant: every request is answered once, or its client is gone;
and what is trained on was sampled behind the very ids that stand before it, for a request whose
client took the answer. An answer that nobody took is taken out of its row, unless a later request
went on from it, which proves that its client has it.
"""

import hashlib
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from custom.env import BadRewardFunction, Message
from custom.model_usage import add_counts
from data.turn_tokens import TemplateRefusal, Tools, TurnTokens
from data.warn_once import warn_once
from features.programs.exchange import Answer, Asked, Earned, Exited, Gone, Refusal, Rewarded
from features.programs.header_rewards import HeaderRewards
from features.programs.other_sampling import other_sampling
from features.programs.protocols.protocol import too_long
from features.programs.spec import ProgramSpec
from features.shared.conversations import Conversations, RowPlace
from workers.environments.reply import StepReply
from workers.rollout.engine import Completion, VersionSpan
from workers.rollout.episode import (
    FAILURES,
    Ask,
    Ended,
    Episode,
    Play,
    Row,
    Sample,
    Sampler,
    Several,
    Turn,
    TurnLimits,
)
from workers.rollout.speaker import NOBODY, Speaker

# Between the numbers of an episode's requests in two attempts.
REQUESTS_PER_ATTEMPT = 1_000_000
# Numbers of turns from here on stand for what is asked, not for how many turns there were.
FIRST_OF_CONTENTS = 1_000_000_000
# Stands for the number of a request that was refused before the episode heard of it.
REFUSED_UNHEARD = 0
NOBODY_TO_PAY = (
    "a program named a reward (X-Reward, or POST /reward) where there is no answer to pay: its "
    "speaker (X-Agent with X-Session-ID) has had none that is trained, and it is dropped; name the "
    "speaker that was answered, or the answer by its id"
)
# Counts of an episode's requests: all that became turns, and which of them made a row
# grow, forked one or began one; those that were refused; answers that nobody took; requests whose
# own sampling was overridden; those that are not trained.
COUNTS = (
    "requests",
    "grows",
    "forks",
    "begins",
    "refused",
    "undelivered",
    "overridden",
    "helpers",
)


@dataclass(eq=False)
class Flight:
    """Holds a request whose answer is being sampled, since `launched_at` of time.perf_counter."""

    asked: Asked
    place: RowPlace
    turn: int
    launched_at: float


@dataclass(eq=False)
class ProgramEpisode:
    """Plays one attempt of an episode whose agent is a program.

    Attributes:
        client_sampling: what becomes of a request that asks for another sampling than the run's.
        flights: requests that are being sampled, by number.
        trained_turns: those whose answers are trained on; helpers' earn nothing.
        turn_of: the turn of every request that became one.
        sizes: how many messages the request of each turn had.
        first_messages: of the first request, with which the episode's first conversation begins.
        depths: of that conversation, the numbers of answers that it has had.
        contents: how often the same ids were to be continued.
        counts: what is counted of the requests, by name.
        header_rewards: what requests' headers have said of turns.
        overflowed: a request had no room.
    """

    episode: Episode
    sampler: Sampler
    limits: TurnLimits
    tokens: TurnTokens
    client_sampling: str = "override"
    flights: dict[int, Flight] = field(default_factory=dict)
    trained_turns: list[int] = field(default_factory=list)
    turn_of: dict[int, int] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    first_messages: list[dict[str, Any]] | None = None
    depths: set[int] = field(default_factory=set)
    contents: Counter[int] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    header_rewards: HeaderRewards = field(default_factory=HeaderRewards)
    overflowed: bool = False

    def __post_init__(self) -> None:
        self.conversations = Conversations(self.tokens, self.limits, self.episode.rows)

    def play(self) -> Play:
        """Plays to `episode.ending`."""
        episode = self.episode
        reset = Ask("reset", (episode.spec, episode.seed, episode.task))
        following = Several(asks=[reset])
        while True:
            try:
                heard = yield following
            except Ended as refusal:
                following = self._refused_by_engine(refusal)
                continue
            if isinstance(heard, Exited):
                break
            following = self._following(heard)
        yield from self._end(heard)
        self._finish_record()

    def _following(self, heard: Any) -> Several:
        """Takes in what came for the episode; returns what is to be done then."""
        if isinstance(heard, Completion):
            return self._sampled(heard)
        if isinstance(heard, Asked):
            return self._asked(heard)
        if isinstance(heard, Gone):
            return self._gone(heard.number)
        if isinstance(heard, Rewarded):
            self._rewarded(heard)
        return Several()

    # Requests

    def _asked(self, asked: Asked) -> Several:
        """Finds a place for a request and has its answer sampled, or refuses it."""
        episode = self.episode
        episode.env_seconds += asked.seconds
        if asked.reward is not None:
            self._pay_by_header(
                self._turn_before(asked),
                asked.reward,
                number=asked.number,
                content=asked.content,
            )
        unknown = self._unknown_id(asked.prompt_ids)
        if unknown is not None:
            size = len(self.tokens.tokenizer)
            told = f"the token id {unknown} is none of the model's, which are 0 to {size - 1}"
            return self._refuse(asked, "template", told)
        if asked.only_counts:
            return self._count(asked)
        if asked.trained:
            self._note_beginning(asked)
        max_turn = self.limits.max_turn
        if episode.ending or (max_turn is not None and len(episode.turns) >= max_turn):
            episode.ending = "max_turns"
            return self._refuse(asked, "ended", f"the episode has had its {max_turn} turns")
        differences = other_sampling(asked, self.sampler(self.episode, 0))
        if differences and self.client_sampling == "refuse":
            return self._refuse(asked, "sampling", "; ".join(differences))
        self.counts["overridden"] += bool(differences)
        try:
            place = self._place(asked)
        except TemplateRefusal as error:
            return self._refuse(asked, "template", str(error))
        if place is None:
            self.overflowed = True
            return self._refuse(
                asked,
                "context_length",
                self._too_long(asked),
            )
        return self._launch(asked, place)

    def _count(self, asked: Asked) -> Several:
        """Tells how many tokens a request has; that is no turn, and has no limit."""
        try:
            size = self._size(asked)
        # As where a request is placed, odd messages are its own fault alone.
        except Exception as error:
            return self._refuse(asked, "template", f"{type(error).__name__}: {error}")
        self.header_rewards.leave_unanswered(asked.number)
        return self._tell(asked.number, Answer(prompt_tokens=size))

    def _size(self, asked: Asked) -> int:
        """Counts the tokens of a request's prompt."""
        if asked.prompt_ids:
            return len(asked.prompt_ids)
        return len(self.tokens.prompt(asked.messages, asked.tools))

    def _too_long(self, asked: Asked) -> str:
        """Says that a request has no room, in words by which agents' libraries know it."""
        size = self._size(asked)
        limits = self.limits
        return too_long(
            size,
            limits.prompt_length,
            f"This conversation has no room: a first prompt may have {limits.prompt_length} tokens "
            f"(data.max_prompt_length), all behind it {limits.response_length} "
            "(data.max_response_length)",
        )

    def _note_beginning(self, asked: Asked) -> None:
        """Notes how the episode begins; where several requests begin it, none of them does."""
        if self.first_messages is None:
            self.first_messages = asked.messages
            self.episode.initial_messages = asked.messages or self._as_text(asked.prompt_ids)
        elif not any(turn.finish_reason for turn in self.episode.turns):
            self.episode.initial_messages = []

    def _unknown_id(self, token_ids: Sequence[int]) -> int | None:
        """Returns an id that no engine can be given; None: there is none.

        A vocabulary that is padded has ids behind the tokenizer's: one that was sampled is known.
        """
        size = len(self.tokens.tokenizer)
        beyond = {token for token in token_ids if token >= size}
        if not beyond:
            return None
        for row in self.episode.rows:
            beyond -= set(row.token_ids)
        return min(beyond, default=None)

    def _place(self, asked: Asked) -> RowPlace | None:
        if asked.prompt_ids:
            return self.conversations.place_ids(asked.prompt_ids, asked.speaker, asked.trained)
        return self.conversations.place(
            asked.messages, asked.tools, asked.speaker, trained=asked.trained
        )

    def _launch(self, asked: Asked, place: RowPlace) -> Several:
        """Makes a request a turn of the episode, and has it sampled."""
        episode = self.episode
        seed_turn = self._seed_turn(asked, place)
        row = self.conversations.enter(place)
        room = self.limits.room(row)
        sampling = self.sampler(episode, seed_turn)
        longest = min(
            room,
            sampling.max_tokens,
            self.limits.max_turn_tokens or room,
            asked.max_tokens or room,
        )
        turn = self._add_turn(asked, place)
        self.flights[asked.number] = Flight(asked, place, turn, time.perf_counter())
        self.turn_of[asked.number] = turn
        self.counts["requests"] += 1
        self.counts[place.kind] += 1
        self.counts["helpers"] += not asked.trained
        sampling = replace(sampling, max_tokens=longest)
        return Several(sample=Sample(row.token_ids, sampling, self._engine_number(asked.number)))

    def _add_turn(self, asked: Asked, place: RowPlace) -> int:
        """Adds a turn to the episode, and what is new since the one before it to that one."""
        turns = self.episode.turns
        new_messages = list(asked.messages) or self._as_text(asked.prompt_ids)
        behind = None
        if place.behind is not None:
            behind = place.behind.turn
            new_messages = self._new_messages(asked, behind)
            if asked.prompt_ids:
                new_messages = self._as_text(place.given)
            before = turns[behind]
            # It may have been paid already.
            reply = before.reply or StepReply()
            if not reply.messages:
                before.reply = replace(reply, messages=new_messages)
        turns.append(Turn(text="", finish_reason="", asked=new_messages, behind=behind))
        self.sizes.append(len(asked.messages))
        if asked.trained:
            self.trained_turns.append(len(turns) - 1)
        return len(turns) - 1

    def _as_text(self, token_ids: Sequence[int]) -> list[Message]:
        """Shows ids that a client asks to be continued, for records; they are no messages."""
        if not token_ids:
            return []
        return [{"role": "user", "content": self.tokens.tokenizer.decode(list(token_ids))}]

    def _new_messages(self, asked: Asked, behind: int) -> list[dict[str, Any]]:
        """Returns a request's messages behind a turn's answer, made-up answers among them."""
        size = self.sizes[behind]
        messages = list(asked.messages)
        if len(messages) > size and messages[size]["role"] == "assistant":
            return messages[size + 1 :]
        return new_since_answer(messages)

    def _engine_number(self, number: int) -> int:
        return self.episode.attempt * REQUESTS_PER_ATTEMPT + number

    def _seed_turn(self, asked: Asked, place: RowPlace) -> int:
        """Returns the number of the turn that seeds an answer.

        In the episode's first conversation it is the number of answers before it, as in an
        environment. Anywhere else it follows from what is to be continued, so that the order in
        which requests happen to come decides nothing; the same request again has another.
        """
        if asked.prompt_ids:
            depth = len({span.turn for span in place.row.spans})
            rows = self.episode.rows
            is_first_conversation = not rows or place.row is rows[0]
        else:
            first = self.first_messages or []
            depth = sum(message["role"] == "assistant" for message in asked.messages)
            is_first_conversation = asked.messages[: len(first)] == first
        if asked.trained and is_first_conversation and depth not in self.depths:
            self.depths.add(depth)
            return depth
        ids = array("q", [*place.row.token_ids, *place.given])
        digest = int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=4).digest())
        self.contents[digest] += 1
        return FIRST_OF_CONTENTS + digest + self.contents[digest]

    # Answers

    def _sampled(self, completion: Completion) -> Several:
        """Adds what was sampled for a request to its row, and answers it."""
        number = int(completion.request_id.rpartition(".")[2]) % REQUESTS_PER_ATTEMPT
        flight = self.flights.pop(number)
        if completion.finish_reason == "abort":
            return self._withdraw(flight, "engine", "the engine aborted the request")
        asked = flight.asked
        kept = self.tokens.length_up_to(completion.token_ids, asked.stop)
        text = self.tokens.text(completion.token_ids[:kept])
        stop = first_stop(text, asked.stop)
        row = flight.place.row
        prompt_tokens = len(row.prompt_ids) + len(row.ids)
        row.append_sampled(cut_completion(completion, kept), flight.turn)
        token_ids = completion.token_ids[:kept]
        self.conversations.leave(flight.place, flight.turn, token_ids)
        turn = self.episode.turns[flight.turn]
        turn.text = text
        turn.finish_reason = "stop" if stop is not None else completion.finish_reason
        turn.tokens = kept
        turn.engine_seconds = time.perf_counter() - flight.launched_at
        token_texts: tuple[str, ...] = ()
        if asked.wants_log_probs and not asked.prompt_ids:
            token_texts = tuple(self.tokens.tokenizer.decode([token]) for token in token_ids)
        answer = Answer(
            text=text,
            finish_reason=turn.finish_reason,
            token_ids=tuple(token_ids),
            log_probs=tuple(completion.log_probs[:kept]),
            prompt_tokens=prompt_tokens,
            token_texts=token_texts,
            stop=stop,
        )
        return self._tell(number, answer)

    def _tell(self, number: int, answer: Answer) -> Several:
        return Several(asks=[Ask("answer", (number, answer))])

    def _refuse(self, asked: Asked, refusal: Refusal, error: str) -> Several:
        """Answers a request with an error."""
        self.counts["refused"] += 1
        self.header_rewards.leave_unanswered(asked.number)
        return self._tell(asked.number, Answer(refusal=refusal, error=error))

    def _withdraw(self, flight: Flight, refusal: Refusal, error: str) -> Several:
        """Answers a request with an error that was to be sampled already."""
        self.conversations.drop(flight.place)
        self.episode.turns[flight.turn].finish_reason = refusal
        return self._refuse(flight.asked, refusal, error)

    def _refused_by_engine(self, refusal: Ended) -> Several:
        """Answers the request that the engine has just refused."""
        # The one that was launched last.
        _, flight = self.flights.popitem()
        _, error = refusal.args
        return self._withdraw(flight, "engine", error)

    def _gone(self, number: int) -> Several:
        """Gives up the answer to a request that nobody takes."""
        self.counts["undelivered"] += 1
        flight = self.flights.pop(number, None)
        if flight is not None:
            self.conversations.drop(flight.place)
            self.episode.turns[flight.turn].finish_reason = "gone"
            self.header_rewards.leave_unanswered(number)
            return Several(dropped=[self._engine_number(number)])
        self._retract(number)
        return Several()

    def _retract(self, number: int) -> None:
        """Takes an answer out of its row that was sampled and that nobody took."""
        turn = self.turn_of.get(number)
        if turn is not None and self.conversations.retract(turn):
            self.header_rewards.leave_unanswered(number)
            entry = self.episode.turns[turn]
            entry.finish_reason = "undelivered"
            entry.tokens = 0
            entry.reply = None

    # Rewards

    def _rewarded(self, heard: Rewarded) -> None:
        """Pays an answer that was named, or the last one that who says so has had."""
        if heard.number is not None:
            turn = self.turn_of.get(heard.number, -1)
            self._pay_named(turn, heard.reward)
            return
        turn = self._last_turn_of(heard.speaker)
        if heard.by_refused:
            self._pay_by_header(turn, heard.reward, number=REFUSED_UNHEARD, content="")
            self.header_rewards.leave_unanswered(REFUSED_UNHEARD)
            return
        if turn == -1 and heard.speaker == NOBODY:
            # All answers are those of speakers with a name: the last one of them is meant.
            turn = max(map(self._last_turn_of, self.conversations.speakers), default=-1)
        self._pay_named(turn, heard.reward)

    def _turn_before(self, asked: Asked) -> int:
        """Returns the turn of the answer before a request: where it goes on, or its speaker's last.

        -1 where there is none. A refused request has one too.
        """
        if asked.prompt_ids:
            turn = self.conversations.turn_before_ids(
                asked.prompt_ids, asked.speaker, asked.trained
            )
        else:
            try:
                turn = self.conversations.turn_before(
                    asked.messages, asked.tools, asked.speaker, asked.trained
                )
            except TemplateRefusal:
                turn = None
        return self._last_turn_of(asked.speaker) if turn is None else turn

    def _last_turn_of(self, speaker: Speaker) -> int:
        """Returns a speaker's last answered turn that can earn something; -1: there is none."""
        turns = self.conversations.turns_of(speaker)
        return max((turn for turn in turns if turn in self.trained_turns), default=-1)

    def _pay_by_header(self, turn: int, reward: float, *, number: int, content: str) -> None:
        """Pays what a request's header says of the answer before it, once."""
        owed = self.header_rewards.owed(turn, reward, number=number, content=content)
        if owed:
            self._pay_named(turn, owed)

    def _pay_named(self, turn: int, reward: float) -> None:
        """Pays what a program says of an answer; says where there is none."""
        if turn == -1:
            warn_once(__name__, NOBODY_TO_PAY)
        self._pay(turn, reward)

    def _pay(self, turn: int, reward: float) -> None:
        """Puts a reward on the last token of a turn; it is dropped where nothing was sampled.

        A helper's turn earns nothing.
        """
        if turn not in self.trained_turns:
            return
        for row in self.episode.rows:
            for span in reversed(row.spans):
                if span.turn != turn:
                    continue
                last = span.end - 1
                row.reward_at[last] = row.reward_at.get(last, 0.0) + reward
                entry = self.episode.turns[turn]
                reply = entry.reply or StepReply()
                entry.reply = replace(reply, reward=(reply.reward or 0.0) + reward)
                return

    # The end

    def _end(self, exited: Exited) -> Play:
        """Ends the episode once its program has; takes out what nobody took."""
        episode = self.episode
        episode.env_seconds += exited.seconds
        dropped = [self._engine_number(number) for number in self.flights]
        self.counts["undelivered"] += len(dropped)
        for flight in self.flights.values():
            self.conversations.drop(flight.place)
            episode.turns[flight.turn].finish_reason = "gone"
        self.flights = {}
        for number in exited.undelivered:
            self.counts["undelivered"] += 1
            self._retract(number)
        self.conversations.drop_helpers()
        if exited.reward is not None and episode.rows:
            self._pay(last_turn(episode.rows), exited.reward)
        for name, earned in exited.earned.items():
            self._settle(name, earned)
        crashed = exited.failure == "env_crash"
        if not episode.ending and self.overflowed and crashed:
            # It could not do with less.
            episode.ending = "overflow"
        episode.ending = episode.ending or exited.failure or "done"
        episode.program = dict(exited.record) | {"metrics": dict(exited.metrics)}
        if episode.ending in FAILURES:
            episode.error = exited.error
        reply = yield Several(asks=[Ask("finish", (episode.ending,))], dropped=dropped)
        while not isinstance(reply, StepReply):
            reply = yield Several()
        self._take_final_reward(reply)

    def _settle(self, name: str, earned: Earned) -> None:
        """Pays a conversation on its last turn, or keeps its rows out of training."""
        episode = self.episode
        rows = [row for row in episode.rows if row.speaker.conversation == name]
        if not earned.trained:
            episode.rows = [row for row in episode.rows if row.speaker.conversation != name]
        elif earned.reward is not None:
            self._pay(last_turn(rows), earned.reward)

    def _take_final_reward(self, reply: StepReply) -> None:
        """Lets the episode's own reward, of a reward function, replace those of its turns."""
        episode = self.episode
        add_counts(episode.models, reply.usage)
        if reply.failure == "reward_fault":
            raise BadRewardFunction(reply.error)
        if reply.failure and episode.ending not in FAILURES:
            episode.ending = reply.failure
            episode.error = reply.error
        if reply.reward is None or episode.ending in FAILURES:
            return
        episode.final_reward = reply.reward
        episode.clear_rewards()
        episode.add_reward(reply.reward)

    def _finish_record(self) -> None:
        """Completes what the episode's facts and record are made of."""
        episode = self.episode
        if not episode.rows:
            episode.rows.append(Row(prompt_ids=[]))
        done = episode.ending == "done"
        if done and episode.turns:
            last = episode.turns[-1]
            last.reply = replace(last.reply or StepReply(), done=True)
        counts = {name: self.counts[name] for name in COUNTS}
        episode.program["counts"] = episode.program.get("counts", {}) | counts


@dataclass(frozen=True)
class ProgramPlayer:
    """Begins to play the episodes of a program, for the turn loop."""

    client_sampling: str = "override"

    def __call__(
        self,
        episode: Episode,
        sampler: Sampler,
        limits: TurnLimits,
        tokens: TurnTokens | None,
        tools: Sequence[Tools],
    ) -> Play:
        """Plays an episode from the start of its program to its end."""
        assert tokens is not None
        return ProgramEpisode(episode, sampler, limits, tokens, self.client_sampling).play()


def player_of(spec: ProgramSpec) -> ProgramPlayer:
    """Returns who plays the episodes of a program, as its kind names it."""
    return ProgramPlayer(spec.client_sampling)


def new_since_answer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages behind the last one of the assistant's."""
    for place in range(len(messages) - 1, -1, -1):
        if messages[place]["role"] == "assistant":
            return messages[place + 1 :]
    return messages


def last_turn(rows: Sequence[Row]) -> int:
    """Returns the last turn of which any row has tokens; -1 where there is none."""
    return max((row.spans[-1].turn for row in rows if row.spans), default=-1)


def first_stop(text: str, stops: Sequence[str]) -> str | None:
    """Returns the stop text that comes first in a text; None: there is none."""
    found = [(text.index(stop), stop) for stop in stops if stop in text]
    return min(found)[1] if found else None


def cut_completion(completion: Completion, length: int) -> Completion:
    """Returns a completion's first tokens, with the versions of the weights that sampled them."""
    if length == len(completion.token_ids):
        return completion
    versions = []
    for version, start, end in completion.versions:
        if start < length:
            versions.append(VersionSpan(version, start, min(end, length)))
    return replace(
        completion,
        token_ids=completion.token_ids[:length],
        log_probs=completion.log_probs[:length],
        versions=tuple(versions),
    )
