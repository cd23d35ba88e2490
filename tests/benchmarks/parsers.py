"""Times the parsing of a typical turn, some 100 words of thought and one call, by each parser.

    python -m tests.benchmarks.parsers

Fails where one takes more than MOST_US.
"""

import sys
import timeit

from custom.tools.parsers import get_parser

MOST_US = 50.0
THOUGHT = (
    "I should first work out how many apples there are, and then divide them among the children. "
    * 6
)
TURNS = {
    "json": THOUGHT
    + '\n```json\n{"name": "calculator", "arguments": {"expression": "(12 + 30) / 7"}}\n```',
    "react": f"Thought: {THOUGHT}"
    '\nAction: calculator\nAction Input: {"expression": "(12 + 30) / 7"}\n',
    "function": THOUGHT
    + '\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "(12 + 30) / 7"}}\n'
    "</tool_call>",
}


def microseconds_per_turn(parser: str, text: str) -> float:
    """Returns the best of seven measurements of 200 calls each."""
    parse = get_parser(parser).parse
    return min(timeit.repeat(lambda: parse(text), number=200, repeat=7)) / 200 * 1e6


if __name__ == "__main__":
    slow = []
    for name, turn in TURNS.items():
        with_call, without = microseconds_per_turn(name, turn), microseconds_per_turn(name, THOUGHT)
        print(f"{name}: {with_call:.1f} us, {without:.1f} us without a call")
        slow += [name] if with_call > MOST_US else []
    sys.exit(f"over {MOST_US:g} us: {', '.join(slow)}" if slow else 0)
