"""Makes the episode viewer of runs: `python -m features.viewer.command RUN_DIR... [--out DIR]`.

It writes RUN_DIR/viewer/index.html, which a browser opens from the disk, without a server. Several
folders are put beside each other in one viewer, in that of the first. Invariant: it reads
RUN_DIR/episodes (or what `records.folder` of RUN_DIR/config.yaml names) and writes nothing but
the viewer and the page of a run that has ended, which then knows that its links lead somewhere; so
it works while a run goes on and after a crash.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from features.viewer.build import RecordedRun, ViewerReport, build_viewer
from features.viewer.records import list_files
from training.config.plain_files import read_plain_text, special_file
from training.features import features
from training.run.recorded_config import flat_settings
from training.run.signals import EndingSignals

PROGRAM = "python -m features.viewer.command"
# So many sentences about damaged records are printed.
MOST_FAULTS = 10


def find_run(folder: Path, number: int) -> RecordedRun:
    """Finds a run's episodes: in RUN_DIR/episodes, where its config says, or in the folder itself.

    Raises:
        ValueError: there are none.
    """
    special = special_file(folder)
    if special is not None:
        raise ValueError(
            f"{special} is no regular file, or too large for what it is: no run writes it"
        )
    places = [folder / "episodes", *_configured(folder / "config.yaml"), folder]
    for place in places:
        if place.is_dir() and list_files(place):
            run_dir = folder.parent if place == folder and folder.name == "episodes" else folder
            return RecordedRun(number=number, folder=run_dir, episodes=place)
    looked = ", ".join(map(str, places))
    raise ValueError(
        f"{folder} holds no episodes (looked for STEP.jsonl and val-STEP.jsonl in {looked}); a run "
        "records them unless records.keep_gib=0"
    )


def require_each_once(runs: Sequence[RecordedRun]) -> None:
    """Raises ValueError where two runs are one, whose episodes would be counted twice."""
    places = [run.episodes.resolve() for run in runs]
    for number, place in enumerate(places):
        if place in places[:number]:
            raise ValueError(f"{runs[number].folder} is given twice: name each run once")


def _configured(config: Path) -> list[Path]:
    """Returns the folder that a recorded config names, if it can be read and names one."""
    try:
        settings = flat_settings(read_plain_text(config))
    except (OSError, ValueError, yaml.YAMLError):
        return []
    named = settings.get("records.folder")
    return [Path(str(named))] if named else []


def own_folder(run_dir: Path) -> Path:
    """Returns the folder of a run's viewer, in the run's own.

    Raises:
        ValueError: a link stands there, which leads elsewhere.
    """
    out = run_dir / "viewer"
    if not out.resolve().is_relative_to(run_dir.resolve()):
        raise ValueError(
            f"{out} leads to {out.resolve()}, outside of the run's folder: name the folder that is "
            "meant with --out"
        )
    return out


def rewrite_page(folder: Path) -> None:
    """Writes the page of a run that has ended anew, where the page's feature is there."""
    if "run_page" not in features():
        return
    from features.run_page.feature import refresh_page

    try:
        refresh_page(folder)
    except (OSError, ValueError) as error:
        print(f"{PROGRAM}: the page of {folder} stays as it is: {error}", file=sys.stderr)


def summary(report: ViewerReport, out: Path) -> str:
    """Says what was made, what it cost, and what could not be read."""
    lines = [
        f"{out / 'index.html'}: {report.episodes} episodes of {report.steps} steps and "
        f"validations, {report.tokens:,} tokens, {report.size / 2**20:.0f} MiB, "
        f"in {report.seconds:.1f} s"
    ]
    lines += [f"  {fault}" for fault in report.faults[:MOST_FAULTS]]
    further = max(len(report.faults) - MOST_FAULTS, 0) + report.further_faults
    if further:
        lines.append(f"  and {further} more, which the viewer lists")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code: 2 where there is nothing to show."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Makes a folder that shows a run's episodes in a browser.",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, help="the folder to make; default: RUN_DIR/viewer")
    args = parser.parse_args(argv)
    signals = EndingSignals()
    try:
        with signals:
            runs = [find_run(folder, number) for number, folder in enumerate(args.runs)]
            require_each_once(runs)
            out = args.out or own_folder(runs[0].folder)
            report = build_viewer(runs, out)
    except (OSError, ValueError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted, no viewer was made", file=sys.stderr)
        return 128 + (signals.received or signal.SIGINT)
    if args.out is None:
        rewrite_page(runs[0].folder)
    print(summary(report, out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
