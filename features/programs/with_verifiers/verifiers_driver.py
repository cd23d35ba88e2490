"""Runs in verifiers' interpreter: as a module it loads the environment, as a program it plays.

Its folder is on that interpreter's path, so that episodes can be forked from a process that has
imported it (programs.preload). Invariant: this project's folder comes last on the path, behind
whatever is installed there.
"""

import os
import sys

PROJECT = os.path.abspath(os.path.join(os.path.dirname(__file__), "../../.."))
if PROJECT not in sys.path:
    sys.path.append(PROJECT)

if __name__ == "__main__":
    from features.programs.with_verifiers import episode

    sys.exit(episode.main())
else:
    from features.programs.with_verifiers import world

    try:
        world.prepare()
    # The program that plays says what is wrong.
    except Exception as error:
        print(f"verifiers' environment is not loaded beforehand: {error!r}", file=sys.stderr)
