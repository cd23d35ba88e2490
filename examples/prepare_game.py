"""Makes a small model for a game of your own: python examples/prepare_game.py GAME.yaml.

The YAML is the run's: it names the environment, its tools, and in actor_rollout_ref.model.path the
folder to make. The environment is played with random answers, those of its `sample_action`, on the
rows of data.train_files where there are any. The words of these games are the tokenizer's, and the
model learns how answers look, not which are good. It has two layers, for a first try on a CPU.
Questions that a game asks the policy itself (policy_calls) are answered by sample_action, too.
Invariant: the folder is there only when it is complete; answers are drawn by a generator that tells
nothing of the environment's own draws.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from prepare_tiny_prompts import SPECIAL, completed, make_model, word_tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from custom.agent import Agent, AgentSpec, as_user_messages
from custom.asking import AskingLine, PolicyAnswer, Question, held, trial_answers
from custom.env import Task
from custom.env_calls import call_method, describe
from data.seeds import seed_beside
from training.building import read_tasks
from training.config import PPOConfig
from training.config.loader import ConfigError, load_config
from training.episode_batches import as_tasks
from training.run.files import from_here
from workers.multi_turn_rollout import agent_specs

GAMES = 1000
# So many are played to know whether a tokenizer that is there has their words.
FEW_GAMES = 100
# A sentence lists at most so many words.
MAX_WORDS_SHOWN = 8
STEPS = 200
BATCH = 64
# Steps between two lines that say how far it is.
TOLD_EVERY = 50
IGNORED = -100
ROLES = ["system", "user", "assistant", "tool", "tools"]
NUMBERS = [str(number) for number in range(21)]
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|> tools "
    "{% for t in tools %}{{ t['function']['name'] }} {% endfor %}<|im_end|> {% endif %}"
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


class Games(NamedTuple):
    """Holds the messages of games, and of what these asked the policy, with the answers."""

    conversations: list[list[dict[str, Any]]]
    asked: list[list[dict[str, Any]]]


def play(
    agent: Agent,
    seed: int,
    max_turn: int,
    task: Task | None = None,
    asked: list[list[dict[str, Any]]] | None = None,
) -> list[dict[str, Any]]:
    """Plays a game with random answers and returns its messages, without what follows the last.

    Args:
        seed: what the game is reset with; answers are drawn under another.
        task: the dataset's row that the game is about.
        asked: what the game asks the policy is added to it, with the answer.
    """
    draw = random.Random(seed_beside(seed, "asked"))

    def exchange(questions: Sequence[Question]) -> list[PolicyAnswer]:
        answers = _random_answers(agent, draw, questions, line.asked)
        for question, answer in zip(questions, answers, strict=True):
            if asked is not None and not answer.refusal:
                reply = {"role": "assistant", "content": answer.text}
                asked.append([*question.messages, reply])
        return answers

    line = AskingLine(exchange)
    with held(line):
        return _play_turns(agent, seed, max_turn, task)


def _play_turns(agent: Agent, seed: int, max_turn: int, task: Task | None) -> list[dict[str, Any]]:
    """Plays the turns of a game; see `play`."""
    draw = random.Random(seed_beside(seed, "answers"))
    messages = list(agent.reset(seed, task))
    for turn in range(max_turn):
        answer = call_method(agent.environment, "sample_action", draw)
        if answer is None:
            sys.exit(
                f"{type(agent.environment).__name__} has no sample_action(self, generator): it "
                "returns an answer, drawn from the generator, as the model is to write it"
            )
        result = agent.step(answer)
        messages.append({"role": "assistant", "content": answer})
        if result.done or turn == max_turn - 1:
            break
        messages += as_user_messages(result.observation)
    return messages


def _random_answers(
    agent: Agent, draw: random.Random, questions: Sequence[Question], before: int
) -> list[PolicyAnswer]:
    """Answers what a game asks the policy by its sample_action; refuses it once it was too much.

    Args:
        before: how many questions the game has asked already.
    """
    answers = trial_answers(questions, before)
    for place, answer in enumerate(answers):
        text = call_method(agent.environment, "sample_action", draw)
        if text is not None and not answer.refusal:
            answers[place] = replace(answer, text=text)
    return answers


def play_games(agent: Agent, games: int, max_turn: int, tasks: Sequence[Task]) -> Games:
    """Plays games 0, 1, …, whose tasks are the rows in turn; exits with what a game raised."""
    played = Games([], [])
    for seed in range(games):
        task = tasks[seed % len(tasks)] if tasks else None
        try:
            messages = play(agent, seed, max_turn, task, played.asked)
        # A user's environment may raise anything.
        except Exception as error:
            rows = "" if tasks else "; data.train_files is not set, so that no row was given"
            sys.exit(f"game {seed} failed{rows}: {describe(error)}")
        played.conversations.append(messages)
    return played


def _tasks_of(config: PPOConfig) -> list[Task]:
    """Returns the rows that games are about; none without data.train_files."""
    data = config.data
    if not data.train_files:
        return []
    rows = read_tasks(data.train_files, data, data.train_max_samples)
    most = min(len(rows), GAMES)
    return as_tasks([rows[number] for number in range(most)])["task"].tolist()


def _tell_of_uncalled_tools(agent: Agent, conversations: list[list[dict[str, Any]]]) -> None:
    """Prints which tools no answer called: the model then knows no call of theirs."""
    if agent.manager is None:
        return
    called: set[str] = set()
    for messages in conversations:
        for message in messages:
            if message["role"] == "assistant":
                called.update(call.name for call in agent.manager.parser.parse(message["content"]))
    for name, tool in agent.manager.registry.tools.items():
        if name in called:
            continue
        arguments = dict.fromkeys(tool.definition.parameters.get("properties", {}), "…")
        example = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        print(
            f"no game called the tool {name}, so that the model cannot write such a call: have "
            f"{type(agent.environment).__name__}.sample_action return calls, too, in the form that "
            f"agent.parser reads (json: {example})",
            flush=True,
        )


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Makes a tokenizer of the words of some texts, of roles and of numbers."""
    words = dict.fromkeys([*SPECIAL, *ROLES, *NUMBERS])
    for text in texts:
        words.update(dict.fromkeys(text.split()))
    return word_tokenizer(words)


def label_answers(ids: list[int], start: int, assistant: int, end: int) -> list[int]:
    """Returns the tokens of answers and of their ends, IGNORED in the place of all others."""
    labels = []
    in_answer = False
    for place, token in enumerate(ids):
        labels.append(token if in_answer else IGNORED)
        if token == end:
            in_answer = False
        elif token == assistant and place > 0 and ids[place - 1] == start:
            in_answer = True
    return labels


def warm_up(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str], steps: int
) -> None:
    """Trains on the answers of the games."""
    start, assistant, end = tokenizer.convert_tokens_to_ids(
        ["<|im_start|>", "assistant", "<|im_end|>"]
    )
    rows = [tokenizer.encode(text) for text in texts]
    length = max(map(len, rows))
    padding = [tokenizer.pad_token_id] * length
    ids = torch.tensor([(row + padding)[:length] for row in rows])  # (games, length)
    labels = torch.tensor([label_answers(row, start, assistant, end) for row in ids.tolist()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(steps):
        if number % TOLD_EVERY == 0:
            print(f"learning the form of answers: step {number} of {steps}", flush=True)
        chosen = torch.randint(len(rows), (BATCH,))
        # Padding lies behind the answers, which do not see it.
        model(input_ids=ids[chosen], labels=labels[chosen]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _words_in(conversations: list[list[dict[str, Any]]]) -> dict[str, None]:
    """Returns the words of some games, each once, in their order."""
    texts = [message["content"] for messages in conversations for message in messages]
    return dict.fromkeys(" ".join(texts).split())


def _spec_to_play(config: PPOConfig) -> AgentSpec:
    """Returns how the agent is built whose games are played; exits where there is no game."""
    if not config.environments:
        sys.exit("agent.environment is missing: give the path and cls of the game")
    [spec, *_] = agent_specs(config)
    if not isinstance(spec, AgentSpec):
        sys.exit("a program plays by itself: name a game to prepare for")
    return spec


def lacking_words(config: PPOConfig, folder: Path, games: int = FEW_GAMES) -> list[str]:
    """Lists the words of some games that the tokenizer in a folder lacks; plays them to know."""
    if not (folder / "tokenizer.json").is_file():
        return []
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.unk_token_id is None:
        return []
    spec = _spec_to_play(config)
    agent = spec.build()
    turns = spec.max_turn or config.agent.max_turn
    played = play_games(agent, games, turns, _tasks_of(config))
    words = _words_in([*played.conversations, *played.asked])
    agent.close()
    return [
        word
        for word in words
        if tokenizer.unk_token_id in tokenizer.encode(word, add_special_tokens=False)
    ]


def tell_what_is_there(config: PPOConfig, folder: Path) -> None:
    """Says that a folder is there already; exits where its tokenizer lacks words of the game."""
    place = from_here(folder)
    fix = "delete it or give another path"
    print(f"{place} is there already, nothing was made: {fix}", flush=True)
    lacking = lacking_words(config, folder)
    if lacking:
        shown = ", ".join(lacking[:MAX_WORDS_SHOWN]) + (", …" * (len(lacking) > MAX_WORDS_SHOWN))
        sys.exit(f"{place}: its tokenizer lacks words of the game ({shown}): {fix}")


def prepare(config: PPOConfig, games: int = GAMES, steps: int = STEPS) -> Path:
    """Writes the model that the config names; returns its folder, which stays where it is there.

    Raises:
        SystemExit: it is there, and its tokenizer lacks words of the game; or nothing can be made.
    """
    path = config.actor_rollout_ref.model.path
    if path is None:
        sys.exit("actor_rollout_ref.model.path is missing: name the folder that is to be made")
    folder = Path(path)
    spec = _spec_to_play(config)
    if folder.exists():
        tell_what_is_there(config, folder)
        return folder
    torch.manual_seed(0)
    agent = spec.build()
    max_turn = spec.max_turn or config.agent.max_turn
    print(f"playing {games} games with answers of sample_action", flush=True)
    played = play_games(agent, games, max_turn, _tasks_of(config))
    _tell_of_uncalled_tools(agent, played.conversations)
    words = _words_in([*played.conversations, *played.asked])
    tools = agent.tool_schemas or []
    names = [tool["function"]["name"] for tool in tools]
    agent.close()
    tokenizer = make_tokenizer([*words, *names])
    model = make_model(tokenizer)
    model.config.max_position_embeddings = max(256, config.data.row_length)
    rendered = [
        tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False)
        for messages in played.conversations
    ]
    # What is asked in a game is answered without its tools.
    rendered += [
        tokenizer.apply_chat_template(messages, tokenize=False) for messages in played.asked
    ]
    warm_up(model, tokenizer, rendered, steps)
    with completed(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
    return folder


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"{__doc__.splitlines()[0]}")
    try:
        print(from_here(prepare(load_config(sys.argv[1:], check=False).config)))
    except ConfigError as error:
        sys.exit(str(error))
