"""Makes what turns conversations into ids and reads turns, as `agent.parser` says.

Invariant: whoever plays, trains or serves a config's turns reads them by the parser that is made
here, and renders them by the same. The parsers `function`, `json` and `react` leave turns as they
stand.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from custom.tools.chat_form import resolve_parser
from custom.tools.families import FamilyParser
from data.turn_tokens import TurnTokens
from training.config import PPOConfig


def turn_tokens(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]
) -> TurnTokens:
    """Makes the tokens of a config's turns, with the reader of its parser.

    Args:
        eos_token_ids: the ids at which sampling stops.

    Raises:
        ValueError: the parser is unknown, or needs what the chat template does not have.
    """
    tokens = TurnTokens(
        tokenizer,
        template_kwargs=dict(config.data.apply_chat_template_kwargs),
        eos_token_ids=eos_token_ids,
    )
    parser = resolve_parser(config.agent.parser, tokens)
    return tokens.read_by(parser) if isinstance(parser, FamilyParser) else tokens


def with_parser(config: PPOConfig, specs: Sequence[Any], tokens: TurnTokens) -> list[Any]:
    """Returns specs whose parser, where the config names it, is the one that reads the turns."""
    named = config.agent.parser
    parser: Any = tokens.reader
    if parser is None:
        # `auto` may have found one that leaves turns as they stand.
        parser = named if named != "auto" else "function"
    return [
        replace(spec, parser=parser) if getattr(spec, "parser", None) == named else spec
        for spec in specs
    ]
