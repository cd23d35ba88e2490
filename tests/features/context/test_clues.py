"""The game of clues, the contexts that its model is warmed up on, and the table of its runs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from clues_game import CLUES, COLOURS, NEXT, TASK, Clues
from prepare_clues import (
    IGNORED,
    KNOWN,
    NOTHING,
    REQUEST,
    assistant,
    context,
    make_tokenizer,
    row_of,
    told,
    user,
)

from custom.agent import Agent
from data.turn_tokens import TurnTokens
from features.context.opening import open_history
from features.context.settings import ContextSettings
from scripts import contexts_table
from scripts.table_runs import folder_of
from tests.conftest import PROJECT
from tests.unit.test_episode import completion, end
from training.config.loader import load_config
from workers.environments.reply import StepReply
from workers.environments.server import EnvServer
from workers.rollout.engine import Sampling
from workers.rollout.episode import Ask, Episode, Sample, TurnLimits
from workers.rollout.episode_play import play_episode

CONFIG = load_config([str(PROJECT / "configs/clues.yaml")], check=False).config


def test_it_tells_five_clues_and_asks_for_one() -> None:
    game = Clues()
    assert game.reset(seed=3) == TASK
    said = [game.step(NEXT)[0].split() for _ in range(6)]
    clues = [words[1] for words in said[:5]]
    assert sorted(clues) == sorted(game.clues.values())
    assert [words[0] for words in said] == ["clue"] * 5 + ["question"]
    assert said[5][1] in COLOURS and all(len(words) == 18 for words in said)
    (answer,) = [clue for clue in clues if clue in CLUES[said[5][1]]]
    assert game.step(answer)[1:3] == (1.0, True)
    again = Clues()
    again.reset(seed=3)
    assert [again.step(NEXT)[0].split() for _ in range(6)] == said, "equal seeds, equal games"
    assert again.step("nonsense")[1:3] == (0.0, True)


def test_the_config_asks_in_the_words_that_the_model_learnt() -> None:
    settings = CONFIG.section(ContextSettings)
    assert settings.request == REQUEST and settings.summary_text == f"{KNOWN} {{summary}}"


def played(context_mode: str) -> tuple[Episode, TurnTokens]:
    """Plays a game with a player that knows all clues of the context it reads."""
    tokenizer = make_tokenizer()
    tokens = TurnTokens(tokenizer, template_kwargs={}, eos_token_ids=[tokenizer.eos_token_id])
    words = [str(PROJECT / "configs/clues.yaml"), f"agent.context={context_mode}"]
    config = load_config(words, check=False).config
    history = None if context_mode == "keep" else open_history(config, tokens)
    limits = TurnLimits(
        prompt_length=config.data.max_prompt_length,
        response_length=config.data.max_response_length,
        max_model_len=config.max_model_len,
        max_turn=config.agent.max_turn,
        max_turn_tokens=config.agent.max_turn_tokens,
        reserved=0 if history is None else history.reserved,
    )
    server = EnvServer()
    server.agent = Agent(Clues())
    episode = Episode(group=0, sample=0, seed=5)
    play = play_episode(episode, lambda _: Sampling(max_tokens=60), limits, tokens, [None], history)
    request: Any = play.send(None)
    while not (isinstance(request, Ask) and request.kind == "finish"):
        if isinstance(request, Ask):
            # The pool's first argument of a reset is which environment it is.
            args = request.args[1:2] if request.kind == "reset" else request.args
            request = play.send(server.call(request.kind, args))
            continue
        assert isinstance(request, Sample)
        request = play.send(completion(tokens, best_answer(tokens.decode(request.token_ids))))
    end(play, StepReply(done=True))
    return episode, tokens


def best_answer(text: str) -> str:
    """Returns the answer of a perfect player to a context."""
    words = text.split()
    known = [word for word in words if any(word in clues for clues in CLUES.values())]
    if words[-5:-3] == REQUEST.split():
        return told(list(dict.fromkeys(known)))
    if "question" in words:
        asked = words[words.index("question") + 1]
        return next((clue for clue in known if clue in CLUES[asked]), NEXT)
    return NEXT


def test_a_perfect_memory_wins_by_summaries() -> None:
    episode, tokens = played("summarise")
    assert (episode.ending, sum(sum(r.reward_at.values()) for r in episode.rows)) == ("done", 1.0)
    assert len(episode.rows) == 6, "five contexts are summarised"
    # Each context reads as one of those that the model is warmed up on.
    first = episode.rows[0].token_ids
    text = tokens.decode(first)
    clue = text.split()[text.split().index("clue") + 1]
    filler = text[text.index("clue") :].split(" <|im_end|>")[0]
    messages = [user(TASK), assistant(NEXT), user(filler), assistant(NEXT), user(REQUEST)]
    ids, _ = row_of(tokens.tokenizer, [*messages, assistant(clue)])
    assert first == ids


def test_what_keeps_the_conversation_overflows_and_last_turns_forget() -> None:
    kept, _ = played("keep")
    assert kept.ending == "overflow" and len(kept.rows) == 1
    cut, _ = played("last_turns")
    assert cut.ending == "done" and len(cut.rows) > 3


def test_the_contexts_of_the_warm_up_are_words_of_the_tokenizer() -> None:
    tokenizer = make_tokenizer()
    draw = random.Random(0)
    for _ in range(50):
        ids, labels = row_of(tokenizer, context(draw))
        assert tokenizer.unk_token_id not in ids
        learnt = [one for one in labels if one != IGNORED]
        assert learnt.count(tokenizer.eos_token_id) in (1, 2, 3)
    assert told([]) == NOTHING


def write_run(folder: Path, rewards: list[float], overflows: float) -> None:
    folder.mkdir(parents=True)
    records = [{"step": 0, "val-core/Clues/reward/mean@1": rewards[0]}]
    for step in (1, 2):
        records.append(
            {
                "step": step,
                "agent/episodes": 10.0,
                "agent/ending/overflow": overflows,
                "actor/given_tokens": 300.0,
                "context/per_episode/mean": 6.0,
                "context/summaries": 40.0,
                "context/summary_tokens/mean": 5.0,
                "context/summary_tokens/share": 0.5,
            }
        )
    records[-1]["val-core/Clues/reward/mean@1"] = rewards[-1]
    lines = [json.dumps(record) for record in records]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_the_table_is_of_the_runs_that_have_ended(tmp_path: Path) -> None:
    trained = folder_of(tmp_path, "summarise, trained", 0)
    write_run(trained, [0.5, 0.9], 1.0)
    write_run(folder_of(tmp_path, "summarise, trained", 1), [0.3, 0.7], 2.0)
    lines = contexts_table.table(tmp_path, [0, 1, 2], steps=2).splitlines()
    assert lines[2:] == [
        "| `summarise`, trained | 2 | 0.40 (0.30–0.50) | 0.80 (0.70–0.90) | 0.15 (0.10–0.20) | "
        "6.0 | 40.0 | 800 |"
    ]
    assert contexts_table.table(tmp_path, [0], steps=3).count("\n") == 1, "it has not ended"


def test_runs_that_have_ended_are_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[tuple[str, int]] = []

    def make(folder: Path, way: str, seed: int, steps: int, words: list[str]) -> int:
        made.append((way, seed))
        write_run(folder, [0.1, 0.2], 0.0)
        return int(len(made) == 3)

    monkeypatch.setattr(contexts_table, "make", make)
    argv = ["--out", str(tmp_path), "--seeds", "0", "--steps", "2"]
    assert contexts_table.main(argv) == 1, "the third failed"
    assert contexts_table.main(argv) == 0
    assert [way for way, _ in made] == list(contexts_table.WAYS), "the third had its steps"
    assert capsys.readouterr().out.count("| `") >= 4
