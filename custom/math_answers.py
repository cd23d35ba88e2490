r"""Finds a response's mathematical answer, and writes it in one form before it is compared.

    "First \boxed{5}. Hence \boxed{6}."   ->  "6"       the last box counts
    "\boxed{1} and \boxed{2}"             ->  "1, 2"    boxes that only a comma or a word joins
    "$\text{34}$."                        ->  "34"      marks around it say nothing

Invariant: text in, text out. What two formulas are worth is math-verify's to say
(custom/verifier_process.py); here is only what it leaves undecided.
"""

import re
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

# A box's beginning, one without braces, another command or escaped brace, or a brace.
BRACE = re.compile(
    r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\(?:boxed|fbox)\s*(?P<bare>[-+]?\w[\w.]*)|\\.|[{}]",
    flags=re.DOTALL,
)
# What may stand between two boxes that are one answer: "\boxed{1}$ and $x_2 = \boxed{2}".
JOINS_BOXES = re.compile(
    r"[\s$]*(?:\\[)\]])?\s*(?:[,;]\s*)?(?:and|or|[,;])\s*(?:\\[(\[])?[\s$]*(?:[a-zA-Z]\w*\s*=\s*)?"
)
TAGGED_ANSWER = re.compile(r"<answer>(.*?)</answer>", flags=re.DOTALL)
# A line that begins with "Answer:", which may be emphasised, or whose formula takes several lines.
ANSWER_LINE = re.compile(
    r"answer\**\s*[:：]\s*(?:\*\*)?\s*(\\\[.*?\\\]|\$\$.*?\$\$|[^\n]+)",
    flags=re.IGNORECASE | re.DOTALL,
)

# Signs that tell of the form alone: sizes, spaces, the end of a turn.
FORM = re.compile(
    r"\\(?:left|right|[bB]ig+[lr]?|displaystyle|textstyle|large|Large|tiny|small|limits)(?![a-zA-Z])"
    r"|<\|[^|>]*\|>|</s>"
)
# A backslash after another ends a matrix's row.
SPACE = re.compile(r"(?<!\\)\\[;:> ]|\\q?quad(?![a-zA-Z])|~|\s+")
# 1{,}000, 1\,000, 1,\!000.
GROUPED_DIGITS = re.compile(r"(?<=\d)(?:\{,\}|,?\\[,!])(?=\d{3}(?!\d))")
SPACED_NUMBER = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
THIN_SPACE = re.compile(r"(?<!\\)\\[,!]")
# A text or font command around the whole, and around a part.
FONT = r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt)|mbox|bm|boldsymbol)\s*"
FONT_AROUND = re.compile(FONT + r"\{([^{}]*)\}")
ROOT = re.compile(r"√\s*(?:\{([^{}]*)\}|\(([^()]*)\)|(\w+))")
# Pairs that may stand around an answer.
AROUND = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"))
SIGNS = {
    "−": "-",
    "–": "-",
    "×": "\\times ",
    "·": "\\cdot ",
    "÷": "/",
    "π": "\\pi ",
    "∞": "\\infty ",
    "°": "^\\circ",
    "²": "^2",
    "³": "^3",
    "≤": "\\le ",
    "≥": "\\ge ",
    "±": "\\pm ",
    "∪": "\\cup ",
    "，": ",",
    "（": "(",
    "）": ")",
    "\u00a0": " ",
    "\u202f": " ",
}
# A choice of several, as it is written: "C", "(C)".
CHOICE = re.compile(r"\(?([A-Z])\)?")
WORDS = re.compile(r"[^\W\d_][^\W\d_ '.-]+(?:[ '.-]+[^\W\d_]+)*")
# Explains an answer on its own line: "34 (since 30 + 4)", "34, because …".
REASON = re.compile(
    r"\s+\([^()]*[a-z]{2,}[^()]*\)$|[,;.]?\s+(?:since|because|as|which|where|so)\s.*$",
    flags=re.IGNORECASE | re.DOTALL,
)
# An answer that is several, or none: a number in it is not the answer.
NOT_ONE = re.compile(r"\b(?:or|and|not|no|never)\b|,(?!\s?\d{3}(?!\d))|;", flags=re.IGNORECASE)


class Box(NamedTuple):
    """Holds what stands in a box, and where the box begins and ends in the text."""

    content: str
    start: int
    end: int


def boxes(text: str) -> list[Box]:
    r"""Lists the boxes of a text that are closed, by where they begin: `\boxed{5}`, `\boxed 5`."""
    found = []
    # Where each brace that is open belongs to a box: that match; None for any other brace.
    opened: list[re.Match[str] | None] = []
    for match in BRACE.finditer(text):
        sign = match.group()
        if match["bare"]:
            found.append(Box(match["bare"].rstrip("."), match.start(), match.end()))
        elif sign.endswith("{") and sign != "\\{":
            opened.append(match if match["box"] else None)
        elif sign == "}" and opened:
            box = opened.pop()
            if box is not None:
                found.append(Box(text[box.end() : match.start()], box.start(), match.end()))
    return sorted(found, key=lambda box: box.start)


def marked_answer(text: str) -> str | None:
    """Returns the answer that a response marks as such.

    The last box, together with those right before it that only a comma, "and" or "or" joins; else
    the last `<answer>…</answer>`; else None.
    """
    found = boxes(text)
    if not found:
        tagged = TAGGED_ANSWER.findall(text)
        return tagged[-1].strip() if tagged else None
    joined = [found[-1]]
    for box in reversed(found[:-1]):
        between = text[box.end : joined[0].start]
        if not JOINS_BOXES.fullmatch(between):
            break
        joined.insert(0, box)
    return ", ".join(dict.fromkeys(box.content.strip() for box in joined))


def answer_line(text: str) -> str | None:
    """Returns what follows the last "Answer:" on its line; None where there is no such line."""
    lines = ANSWER_LINE.findall(text)
    return lines[-1] if lines else None


def plain_form(text: str) -> str:
    r"""Takes off what says nothing of an answer's value.

    "$\text{34}$." -> "34", "1\,000" -> "1000", "\left(1,\, 2\right)" -> "(1, 2)", "−4" -> "-4"
    """
    for sign, replacement in SIGNS.items():
        text = text.replace(sign, replacement)
    text = ROOT.sub(lambda match: f"\\sqrt{{{next(filter(None, match.groups()))}}}", text)
    text = GROUPED_DIGITS.sub("", FORM.sub("", text))
    text = SPACE.sub(" ", THIN_SPACE.sub(" ", text))
    before = None
    while text != before:
        before = text
        text = _without_marks(text.strip())
    if SPACED_NUMBER.fullmatch(text):
        text = text.replace(" ", "")
    return re.sub(r"^([-+]) +(?=\d)", r"\1", text)


def _without_marks(text: str) -> str:
    """Takes off one pair of marks around a text, a command around it, and a full stop."""
    if text.endswith(".") and not text.endswith("..."):
        text = text[:-1].rstrip()
    for opening, closing in AROUND:
        inner = text[len(opening) : -len(closing)]
        is_around = text.startswith(opening) and text.endswith(closing) and len(inner) > 0
        if is_around and opening not in inner:
            return inner
    if text.startswith("\\$"):
        return text[2:]
    command = FONT_AROUND.fullmatch(text)
    return command.group(1) if command else text


def same_text(first: str, second: str) -> bool:
    """Checks whether two answers in plain form are the same, as words or as numbers."""
    if not first or not second:
        return False
    if _key(first) == _key(second):
        return True
    try:
        return Decimal(first) == Decimal(second)
    except InvalidOperation:
        return False


def _key(text: str) -> str:
    """Returns a text without fonts and needless spaces; words in lower case, a choice its letter.

    "\\text{(C)}" -> "C", "\\text{Not enough}" -> "not enough", "(1, 2)" -> "(1,2)"
    """
    text = FONT_AROUND.sub(r"\1", text).strip()
    choice = CHOICE.fullmatch(text)
    if choice:
        return choice.group(1)
    if WORDS.fullmatch(text):
        return " ".join(text.casefold().split())
    # A space between two words or numbers parts them, any other says nothing.
    return re.sub(r"(?<!\w)\s+|\s+(?!\w)", "", text)


def without_reason(line: str) -> str:
    """Cuts off why it is the answer: "34 (since 30 + 4)" -> "34"."""
    return REASON.sub("", line)


def names_one(line: str) -> bool:
    """Checks whether a sentence names one answer: "5 or 6" and "not 5" do not."""
    return NOT_ONE.search(line) is None
