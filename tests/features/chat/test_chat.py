"""A person in the terminal: what they type, what they see, and what the environment makes of it."""

from __future__ import annotations

import io
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict

import pytest

from custom.agent import AgentSpec
from custom.envs.person import PersonEnvironment, PersonsReply
from features.chat.players import CallsHere
from features.chat.terminal import EnvironmentsVoice, Terminal, printable
from training.run.signals import EndingSignals


def terminal(typed: str) -> tuple[Terminal, io.StringIO]:
    shown = io.StringIO()
    return Terminal(io.StringIO(typed), shown), shown


def said(typed: str, replies: int) -> list[PersonsReply]:
    """The words of a person who types so as the environment."""
    voice = EnvironmentsVoice(terminal(typed)[0])
    return [voice.ask() for _ in range(replies)]


def test_a_message_is_a_line_several_lines_or_a_block() -> None:
    typed = 'one\ntwo \\\nlines\n"""\n/done is no command here\n\nlast\n"""\n//slash\n\n'
    assert [reply.text for reply in said(typed, 5)] == [
        "one",
        "two \nlines",
        "/done is no command here\n\nlast",
        "/slash",
        "",
    ]


def test_commands_set_the_reward_of_one_turn_the_end_and_the_system_message() -> None:
    typed = "/system Be brief.\nhello\n/reward 0.5\nagain\nmore\n/reward -1\n/done bye\n"
    assert said(typed, 4) == [
        PersonsReply("hello", system="Be brief."),
        PersonsReply("again", reward=0.5, system="Be brief."),
        PersonsReply("more", system="Be brief."),
        PersonsReply("bye", reward=-1.0, done=True, system="Be brief."),
    ]


@pytest.mark.parametrize("wrong", ["nan", "inf", "", "much", "1 2"])
def test_a_reward_that_is_no_finite_number_is_asked_for_again(wrong: str) -> None:
    person, shown = terminal(f"hello\n/reward {wrong}\nbye\n")
    voice = EnvironmentsVoice(person)
    voice.ask()
    assert voice.ask() == PersonsReply("bye", reward=0.0)
    assert "takes a finite number" in shown.getvalue()


def test_a_command_that_means_nothing_is_no_message() -> None:
    person, shown = terminal("/done\n/reward 1\n/dnoe\nhello\n/system late\nbye\n")
    voice = EnvironmentsVoice(person)
    assert voice.ask().text == "hello"
    assert voice.ask() == PersonsReply("bye")
    for command in ("/done", "/reward", "/dnoe"):
        assert f"{command} is no command before the first message" in shown.getvalue()
    assert "/system is no command after" in shown.getvalue()


def test_the_end_of_what_is_typed_ends_the_episode_with_its_reward() -> None:
    assert said("hello\n/reward 2\n", 2)[1] == PersonsReply("", reward=2.0, done=True)
    assert said('hello\n"""\nhalf a block\n', 2)[1].done
    with pytest.raises(EOFError):
        said("", 1)


def test_what_a_model_writes_moves_no_cursor_and_turns_no_text() -> None:
    person, shown = terminal("")
    person.show_message("policy", "\x1b[2J\x1b]0;owned\x07 a\u202eb\rX \u2028 é 数 ok\t\udc80")
    text = shown.getvalue()
    assert not any(sign in text for sign in "\x1b\x07\r\u202e\u2028\udc80")
    assert "\\x1b[2J" in text and "\\u202e" in text and "é 数 ok\t" in text
    assert printable("plain\ntext") == "plain\ntext"


def test_a_persons_replies_are_an_environment_that_says_the_same_again() -> None:
    replies = [PersonsReply("hi", system="S"), PersonsReply("more", 0.5), PersonsReply("", 1, True)]
    live = PersonEnvironment(iter(replies).__next__)
    first = live.reset(seed=1)
    steps = [live.step("a"), live.step("b")]
    assert first == [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    assert steps == [("more", 0.5, False, {}), ("", 1, True, {})]
    again = PersonEnvironment()
    assert again.reset(seed=2, **live.task) == first
    assert [again.step("a"), again.step("b")] == steps
    assert again.step("beyond") == ("", 0.0, True, {})
    assert live.task == {"replies": [asdict(reply) for reply in replies]}
    with pytest.raises(ValueError, match="a person answers only in"):
        PersonEnvironment().reset()


def test_tools_answer_their_calls_and_the_person_all_else() -> None:
    replies = [PersonsReply("2 + 3?"), PersonsReply("right", 1.0, True)]
    person = PersonEnvironment(iter(replies).__next__)
    spec = AgentSpec(environment=person.itself, tools=("calculator",), parser="json")
    calls = CallsHere(spec)
    calls.reset(0, 0, 7, {})
    calls.step(0, '{"name": "calculator", "arguments": {"expression": "2 + 3"}}')
    calls.step(0, "It is 5.")
    calls.finish(0, "done")
    [(_, first), (_, tool), (_, last), (_, end)] = calls.poll(0.0)
    assert first.messages == [{"role": "user", "content": "2 + 3?"}]
    assert [call["name"] for call in tool.tool_calls] == ["calculator"]
    assert "5" in tool.messages[0]["content"] and not tool.done
    assert (last.reward, last.done, last.tool_calls) == (1.0, True, [])
    assert not end.failure


def test_ctrl_c_between_two_questions_ends_the_episode_when_the_person_is_asked() -> None:
    # A shell may have started the tests with it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with EndingSignals() as signals:
            typed = io.StringIO("hello\n/reward 1\nnever read\n")
            person = Terminal(typed, io.StringIO(), signals)
            signals.postpone = lambda: not person.is_reading
            voice = EnvironmentsVoice(person)
            assert voice.ask().text == "hello"
            # While the policy answers, say, or the reply is on its way.
            os.kill(os.getpid(), signal.SIGINT)
            assert voice.ask() == PersonsReply("", done=True)
            with pytest.raises(KeyboardInterrupt):
                person.pause()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_person_who_reads_no_more_has_left_and_the_episode_ends() -> None:
    """As with `| tee log`, which Ctrl-C ends first."""
    reader, writer = os.pipe()
    os.close(reader)
    nobody = os.fdopen(writer, "w")
    try:
        person = Terminal(io.StringIO("never read\n"), nobody)
        person.show("a line")
        assert person.has_ended
        with pytest.raises(EOFError):
            EnvironmentsVoice(person).ask()
    finally:
        # The rest of its buffer has nowhere to go.
        with suppress(BrokenPipeError):
            nobody.close()


def test_a_process_without_input_and_output_has_a_person_who_has_left(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setattr(sys, "stdout", None)
    person = Terminal()
    person.show("nobody reads it")
    with pytest.raises(EOFError):
        person.line("> ")
    person.pause()
