"""The forms in which families of models write tool calls and thinking, by their names.

    family         what they share: FamilyParser, ReadTurn, TemplateFacts
    json_forms     arguments as JSON between markers
    xml_forms      each argument between tags
    literal_forms  calls as code (literals reads their values)
    harmony        gpt-oss's channels

Invariant: what one of them reads depends on the text alone, and on the chat template's facts.
"""

from custom.tools.families.family import FamilyParser, ReadTurn, TemplateFacts, said_in
from custom.tools.families.harmony import HarmonyParser
from custom.tools.families.json_forms import (
    DeepSeekParser,
    HermesParser,
    JSONFenceParser,
    KimiParser,
    Llama3JSONParser,
    LlamaFunctionParser,
    MistralParser,
)
from custom.tools.families.literal_forms import GemmaParser, PythonicParser
from custom.tools.families.xml_forms import GLMParser, MiniMaxParser, QwenXMLParser

# In the order in which `auto` tries them.
FAMILIES: dict[str, type[FamilyParser]] = {
    family.name: family
    for family in (
        QwenXMLParser,
        GLMParser,
        HermesParser,
        HarmonyParser,
        DeepSeekParser,
        KimiParser,
        MiniMaxParser,
        MistralParser,
        GemmaParser,
        LlamaFunctionParser,
        PythonicParser,
        Llama3JSONParser,
        JSONFenceParser,
    )
}

__all__ = [
    "FAMILIES",
    "DeepSeekParser",
    "FamilyParser",
    "GLMParser",
    "GemmaParser",
    "HarmonyParser",
    "HermesParser",
    "JSONFenceParser",
    "KimiParser",
    "Llama3JSONParser",
    "LlamaFunctionParser",
    "MiniMaxParser",
    "MistralParser",
    "PythonicParser",
    "QwenXMLParser",
    "ReadTurn",
    "TemplateFacts",
    "said_in",
]
