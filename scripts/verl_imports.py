"""Says what the imports from verl in Python files become here; nothing of the files is executed.

    python scripts/verl_imports.py mine.py tools/*.py             # for each import what to write
    python scripts/verl_imports.py mine.py --write                # and write it into the files

What nothing here has is said, and its import stays as it is. The exit code is then 1.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.features import require_feature

require_feature("verl", "scripts/verl_imports.py")

from features.verl.verl_modules import rewritten, translate  # noqa: E402


def main() -> int:
    """Prints, or writes, the imports of the files that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="change the files")
    arguments = parser.parse_args()
    missing = 0
    for file in arguments.files:
        # Line ends stay as they are.
        source = file.read_bytes().decode("utf-8")
        try:
            entries = translate(source)
        except SyntaxError as error:
            print(f"{file}:{error.lineno}: it is no Python that can be read ({error.msg})")
            missing += 1
            continue
        for entry in entries:
            print(f"{file}:{entry.first_line}: {entry.written}")
            for line in entry.here:
                print(f"    {line}")
            for name in entry.missing:
                print(f"    {name} is not here, see features/verl/names.md")
            missing += len(entry.missing)
        if arguments.write:
            file.write_bytes(rewritten(source).encode("utf-8"))
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main())
