"""Environments of other libraries, played as games of text.

    base            what adapters share: a prompt template, an episode's end
    gymnasium       with gymnasium_spaces (observations and actions as text), gymnasium_legends
                    (how a game is told to a player who reads) and gymnasium_minigrid
    reasoning_gym, textarena (and its opponents), textworld, verifiers
    openenv         a server's environment, over its WebSocket

Invariant: an adapter imports its library when one of its environments is made;
custom/env_factory.py imports the adapter then.
"""
