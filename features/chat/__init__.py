"""One episode with a person in the terminal: `python main.py CONFIG --chat MODEL`.

command.py    the words of the command line, and the episode from its beginning to its record
players.py    the person in place of the environment, or of the engine
terminal.py   what the person reads and types
"""
