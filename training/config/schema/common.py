"""Holds what several sections have in common."""

from typing import Literal

from training.config.section import InputPath, Section

Dtype = Literal["bfloat16", "float16", "float32"]


class CustomClassConfig(Section):
    """A class of your own from a Python file."""

    path: InputPath | None = None  #: Python file; null = the built-in class
    name: str | None = None  #: name of the class in that file
