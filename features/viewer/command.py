"""Makes the episode viewer of runs: `python -m features.viewer.command RUN_DIR... [--out DIR]`.

`--bundle DIR` makes a folder that can be sent: the page, the viewer, and a run's metrics.

It writes RUN_DIR/viewer/index.html, which a browser opens from the disk, without a server. Several
folders are put beside each other in one viewer, in that of the first. Invariant: it reads
RUN_DIR/episodes (or what `records.folder` of RUN_DIR/config.yaml names) and writes nothing but
the viewer and the page of a run that has ended, which then knows that its links lead somewhere; so
it works while a run goes on and after a crash.
"""

import argparse
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from features.viewer.build import RecordedRun, ViewerReport, build_viewer
from features.viewer.records import list_files
from training.config.plain_files import read_plain_text, special_file
from training.features import features
from training.run.recorded_config import flat_settings
from training.run.signals import EndingSignals

PROGRAM = "python -m features.viewer.command"
# A folder to send holds these files beside the viewer, where the run has them.
PAGE = "report.html"
BUNDLED = ("metrics.jsonl", "events.jsonl", "config.yaml")
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
    places = []
    for place in _places(folder):
        places.append(place)
        if place.is_dir() and list_files(place):
            run_dir = folder.parent if place == folder and folder.name == "episodes" else folder
            return RecordedRun(number=number, folder=run_dir, episodes=place)
    looked = ", ".join(map(str, places))
    raise ValueError(
        f"{folder} holds no episodes (looked for STEP.jsonl and val-STEP.jsonl in {looked}); a run "
        "records them unless records.keep_gib=0"
    )


def _places(folder: Path) -> Iterator[Path]:
    """Yields where a run's episodes may be; its config is read only where they are not there."""
    yield folder / "episodes"
    yield from _configured(folder / "config.yaml")
    yield folder


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


def start_bundle(folder: Path) -> Path:
    """Makes the folder that is to be sent.

    Raises:
        ValueError: it is there, and is no bundle.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        left = [] if not folder.is_dir() else [p.name for p in folder.iterdir()]
        if not left or not set(left) <= {"viewer", *BUNDLED, PAGE}:
            raise ValueError(f"{folder} is there and is no bundle: name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def finish_bundle(folder: Path, runs: Sequence[RecordedRun]) -> None:
    """Adds the runs' page, with links into the viewer beside it, and one run's metrics."""
    run_dirs = [run.folder for run in runs]
    if len(run_dirs) == 1:
        for name in BUNDLED:
            if (run_dirs[0] / name).is_file():
                shutil.copyfile(run_dirs[0] / name, folder / name)
    if "run_page" not in features():
        return
    from features.run_page.feature import write_page_of

    write_page_of(run_dirs, folder / PAGE, viewer=folder / "viewer" / "index.html")


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
    parser.add_argument(
        "--goes-on", action="store_true", help="the run goes on, and makes the viewer again"
    )
    parser.add_argument(
        "--bundle", type=Path, metavar="DIR", help="a folder to send: page, viewer and metrics"
    )
    args = parser.parse_args(argv)
    signals = EndingSignals()
    try:
        with signals:
            runs = [find_run(folder, number) for number, folder in enumerate(args.runs)]
            require_each_once(runs)
            out = args.out or own_folder(runs[0].folder)
            if args.bundle is not None:
                out = start_bundle(args.bundle) / "viewer"
            report = build_viewer(runs, out, goes_on=args.goes_on)
            if args.bundle is not None:
                finish_bundle(args.bundle, runs)
    except (OSError, ValueError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted, no viewer was made", file=sys.stderr)
        return 128 + (signals.received or signal.SIGINT)
    if args.out is None and args.bundle is None:
        rewrite_page(runs[0].folder)
    print(summary(report, out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
