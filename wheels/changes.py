"""Moves the changes in changes/ to CHANGELOG.md, under a version and a date, and removes their files:

    python wheels/changes.py X.Y.Z [YEAR-MONTH-DAY]

A file has one line, `Kind: sentence`; see changes/README.md. Entries under Unreleased are also moved to the version.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
LONGEST = 230
HEADING = re.compile(r"^## (.*)\n", re.M)


def list_fragments(root: Path) -> list[Path]:
    """Returns the files of unreleased changes."""
    return sorted(path for path in (root / "changes").glob("*") if path.name != "README.md")


def read_fragment(path: Path) -> tuple[str, str]:
    """Returns the kind of a change and its sentence. Raises ValueError, with the file's name, for any other form."""
    parts = re.fullmatch(r"(\w+): (\S.*)\n?", path.read_text(encoding="utf-8"))
    if path.suffix != ".md" or not parts or parts[1] not in KINDS:
        raise ValueError(f"{path}: expected a .md file with one line, `Kind: sentence`; the kinds are {', '.join(KINDS)}")
    if len(parts[2]) > LONGEST:
        raise ValueError(f"{path}: the sentence has {len(parts[2])} characters; expected at most {LONGEST}")
    return parts[1], parts[2]


def join_changes(text: str, changes: list[tuple[str, str]], version: str, day: str) -> str:
    """Returns the text of CHANGELOG.md with an entry for a version: the entries under Unreleased, and the changes."""
    head, heading, rest = text.partition("## Unreleased\n")
    if not heading:
        raise ValueError("CHANGELOG.md has no section Unreleased")
    if f"## {version} - " in text:
        raise ValueError(f"CHANGELOG.md already has {version}")
    following = HEADING.search(rest)
    unreleased, released = (rest[: following.start()], rest[following.start() :]) if following else (rest, "")
    sections: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for section in unreleased.split("### ")[1:]:
        kind, *lines = section.splitlines()
        if kind not in sections:
            raise ValueError(f"CHANGELOG.md has {kind} under Unreleased: expected one of {', '.join(KINDS)}")
        sections[kind] += [line for line in lines if line]
    for kind, sentence in changes:
        sections[kind].append(f"- {sentence}")
    parts = [f"### {kind}\n\n" + "\n".join(lines) + "\n\n" for kind, lines in sections.items() if lines]
    if not parts:
        raise ValueError("nothing is unreleased")
    return f"{head}## Unreleased\n\n## {version} - {day}\n\n{''.join(parts)}{released}".rstrip("\n") + "\n"


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("day", nargs="?", default=datetime.date.today().isoformat())
    options = parser.parse_args(argv)
    fragments = list_fragments(root)
    changelog = root / "CHANGELOG.md"
    try:
        changes = [read_fragment(path) for path in fragments]
        text = join_changes(changelog.read_text(encoding="utf-8"), changes, options.version, options.day)
    except ValueError as error:
        print(f"changes: {error}", file=sys.stderr)
        return 1
    changelog.write_text(text, encoding="utf-8")
    for path in fragments:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
