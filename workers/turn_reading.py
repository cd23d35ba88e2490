"""Makes what turns conversations into ids and reads turns, as `agent.parser` says.

Invariant: whoever plays, trains or serves a config's turns reads them by the parser that is made
here, and renders them by the same. The parsers `function`, `json` and `react` leave turns as they
stand.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from custom.tools.chat_form import AUTO, resolve_parser, under_template
from custom.tools.families import FAMILIES, FamilyParser
from custom.tools.vllm_parsers import PREFIX
from data.turn_tokens import TurnTokens
from training.config import PPOConfig


def turn_tokens(
    config: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    eos_token_ids: Sequence[int],
    specs: Sequence[Any] = (),
) -> TurnTokens:
    """Makes the tokens of a config's turns, with the reader of its parser.

    Args:
        eos_token_ids: the ids at which sampling stops.
        specs: who plays; a family's parser that one of them brings wins over the config's.

    Raises:
        ValueError: the parser is unknown, or needs what the chat template does not have.
    """
    tokens = TurnTokens(
        tokenizer,
        template_kwargs=dict(config.data.apply_chat_template_kwargs),
        eos_token_ids=eos_token_ids,
    )
    named: Any = config.agent.parser
    for spec in specs:
        own = getattr(spec, "parser", None)
        if reads_parts(own):
            named = own
    if isinstance(named, FamilyParser):
        return tokens.read_by(under_template(named, tokens))
    parser = resolve_parser(named, tokens)
    return tokens.read_by(parser) if isinstance(parser, FamilyParser) else tokens


def reads_parts(parser: Any) -> bool:
    """Checks whether a spec's parser, by name or as an object, is a family's."""
    if isinstance(parser, str):
        return parser == AUTO or parser in FAMILIES or parser.startswith(PREFIX)
    return isinstance(parser, FamilyParser)


def with_parser(specs: Sequence[Any], tokens: TurnTokens) -> list[Any]:
    """Returns specs whose parser, where it is a family's, is the one that reads the turns.

    A policy has one chat template, and so one form of calls. `auto` may have found one that leaves
    turns as they stand.
    """
    parser: Any = tokens.reader or "function"
    return [
        replace(spec, parser=parser) if reads_parts(getattr(spec, "parser", None)) else spec
        for spec in specs
    ]
