"""Tests that a release with a missing part is refused. `make release` itself is not run here."""

from __future__ import annotations

import configparser
import hashlib
import importlib
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

sys.path[:0] = [str(ROOT / "wheels")]

import release  # noqa: E402

import changes  # noqa: E402

ENTRY = "# Changelog\n\n## Unreleased\n\n## 1.2.3 - 2026-01-31\n\n### Added\n\n- All.\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Returns a repository that is ready for the release 1.2.3."""
    (tmp_path / "gosrc/cli").mkdir(parents=True)
    (tmp_path / "gosrc/cli/cli.go").write_text('package cli\n\nconst Version = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(ENTRY)
    (tmp_path / "pyproject.toml").write_text('[project.urls]\nHomepage = "https://host.org/"\n')
    commit(tmp_path)
    git(tmp_path, "tag", "v1.2.3")
    return tmp_path


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "all")


def test_a_commit_that_is_ready(tree: Path) -> None:
    """A clean commit with a changelog entry and a tag has no faults."""
    assert release.version_of(tree) == "1.2.3"
    assert release.unclean(tree) == release.unready(tree) == []


def test_uncommitted_files_are_named(tree: Path) -> None:
    (tree / "new").write_text("x")
    assert release.unclean(tree) == ["the tree is not clean: ?? new"]


@pytest.mark.parametrize(
    "changelog, found",
    [
        (ENTRY.replace("1.2.3", "1.2.2"), "newest entry"),
        (ENTRY.replace(" - 2026-01-31", ""), "newest entry"),
        ("# Changelog\n\n## Unreleased\n", "newest entry"),
        (ENTRY.replace("Unreleased\n", "Unreleased\n\n### Fixed\n\n- It.\n"), "not empty"),
        (ENTRY.replace("## Unreleased\n\n", ""), "not empty"),
    ],
)
def test_the_changelog_has_its_entry(tree: Path, changelog: str, found: str) -> None:
    """A release is refused if the changelog has no dated entry for it, or entries under Unreleased."""
    (tree / "CHANGELOG.md").write_text(changelog)
    assert any(found in fault for fault in release.unready(tree))


def test_changes_of_the_project_have_their_form() -> None:
    """Each file in changes/ has a kind and a sentence, so it can be merged into the changelog."""
    text = (ROOT / "CHANGELOG.md").read_text()
    own = [changes.read_fragment(path) for path in changes.list_fragments(ROOT)]
    assert changes.join_changes(text, own, "9.9.9", "2099-01-01").count("## 9.9.9 - 2099-01-01\n") == 1


def test_changes_join_the_changelog(tree: Path) -> None:
    """Files in changes/ become entries below those under Unreleased, sorted by kind, and are removed. Older versions
    stay unchanged. A release is refused while such a file is left."""
    old = ENTRY.replace("Unreleased\n", "Unreleased\n\n### Fixed\n\n- It.\n")
    (tree / "CHANGELOG.md").write_text(old)
    (tree / "changes").mkdir()
    for name, line in {"README": "# x", "b": "Fixed: This: too.", "a": "Added: That.\n", "c": "Fixed: More."}.items():
        (tree / "changes" / f"{name}.md").write_text(line)
    assert [fault for fault in release.unready(tree) if "changes/a.md" in fault]
    assert changes.main(["1.3.0", "2026-02-03"], tree) == 0
    entry = "## 1.3.0 - 2026-02-03\n\n### Added\n\n- That.\n\n### Fixed\n\n- It.\n- This: too.\n- More.\n\n"
    assert (tree / "CHANGELOG.md").read_text() == ENTRY.replace("## 1.2.3", entry + "## 1.2.3")
    assert [path.name for path in (tree / "changes").iterdir()] == ["README.md"]
    assert not [fault for fault in release.unready(tree) if "changes" in fault]


@pytest.mark.parametrize(
    "name, line, fault",
    [
        ("a.md", "Mended: It.", "a.md"),
        ("a.md", "Fixed:", "a.md"),
        ("a.md", "Fixed: It.\nAnd more.\n", "a.md"),
        ("a.txt", "Fixed: It.", "a.txt"),
        ("a.md", "Fixed: " + "x" * 231, "231"),
        ("README.md", "", "nothing is unreleased"),
    ],
)
def test_a_malformed_change_is_reported(
    tree: Path, capsys: pytest.CaptureFixture[str], name: str, line: str, fault: str
) -> None:
    """A malformed file in changes/ is reported. It and the changelog stay unchanged."""
    (tree / "changes").mkdir()
    (tree / "changes" / name).write_text(line)
    assert changes.main(["1.3.0"], tree) == 1 and fault in capsys.readouterr().err
    assert (tree / "CHANGELOG.md").read_text() == ENTRY and (tree / "changes" / name).read_text() == line


def test_a_first_release_lists_fixes() -> None:
    """Fixes before the first release are listed as Fixed, because people also build from the repository."""
    first = "# Changelog\n\n## Unreleased\n\n### Added\n\n- All.\n"
    joined = changes.join_changes(first, [("Added", "More."), ("Fixed", "It.")], "0.1.0", "2026-01-01")
    assert joined.endswith("## 0.1.0 - 2026-01-01\n\n### Added\n\n- All.\n- More.\n\n### Fixed\n\n- It.\n")


def test_placeholder_addresses_are_reported(tree: Path) -> None:
    (tree / "pyproject.toml").write_text('[project.urls]\nHomepage = "https://overwire.example/"\n')
    assert release.unready(tree) == ["pyproject.toml: 1 addresses of [project.urls] are placeholders"]


def test_the_tag_of_the_version_is_at_this_commit(tree: Path) -> None:
    """A release is refused if the version's tag is at another commit."""
    (tree / "more").write_text("x")
    commit(tree)
    assert release.unready(tree) == ["no tag v1.2.3 at this commit: git tag -a v1.2.3"]


def archives(folder: Path, *, bill: str = "{}", leave_out: str = "") -> Path:
    """Returns a folder with an sdist, a wheel for each architecture, and a portable wheel."""
    zipfile.ZipFile(folder / "overwire-1.2.3-py3-none-any.whl", "w").close()
    members = {"setup.py": "x", "licenses/THIRD-PARTY.txt": "x", "licenses/overwire.cdx.json": "{}"}
    with tarfile.open(folder / "overwire-1.2.3.tar.gz", "w:gz") as tar:
        for name, text in members.items():
            if name != leave_out:
                (folder / "member").write_text(text)
                tar.add(folder / "member", f"overwire-1.2.3/{name}")
    for architecture in release.ARCHITECTURES:
        with zipfile.ZipFile(folder / f"overwire-1.2.3-cp310-abi3-manylinux_2_17_{architecture}.whl", "w") as z:
            z.writestr("overwire-1.2.3.dist-info/sboms/overwire.cdx.json", bill)
    return folder


def test_archives_are_complete(tmp_path: Path) -> None:
    assert release.incomplete(archives(tmp_path), ["setup.py", ".gitignore"], "1.2.3") == []
    *wheels, sdist = release.sums(tmp_path).splitlines()
    assert len(wheels) == len(release.ARCHITECTURES) + 1 and all(line.endswith(".whl") for line in wheels)
    digest = hashlib.sha256((tmp_path / "overwire-1.2.3.tar.gz").read_bytes()).hexdigest()
    assert sdist == f"{digest}  overwire-1.2.3.tar.gz"


@pytest.mark.parametrize(
    "options, tracked, found",
    [
        ({"leave_out": "setup.py"}, ["setup.py"], "lacks setup.py"),
        ({"leave_out": "licenses/THIRD-PARTY.txt"}, [], "lacks licenses/THIRD-PARTY.txt"),
        ({"leave_out": "licenses/overwire.cdx.json"}, [], "lacks licenses/overwire.cdx.json"),
        ({"bill": '{"components": [{"type": "library", "bom-ref": "other"}]}'}, [], "bill of materials"),
    ],
)
def test_missing_archive_parts_are_named(
    tmp_path: Path, options: dict[str, str], tracked: list[str], found: str
) -> None:
    assert any(found in fault for fault in release.incomplete(archives(tmp_path, **options), tracked, "1.2.3"))


def test_each_architecture_has_a_wheel(tmp_path: Path) -> None:
    for wheel in archives(tmp_path).glob("*.whl"):
        wheel.unlink()
    assert release.incomplete(tmp_path, [], "1.2.3")[0].startswith("0 wheels of 1.2.3 for ")
    assert release.incomplete(archives(tmp_path), [], "2.0.0")[-1] == "no overwire-2.0.0.tar.gz"


def test_entry_points_of_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point groups of vLLM and SGLang name functions that exist."""
    monkeypatch.syspath_prepend(str(ROOT))
    setup: Any = importlib.import_module("setup")
    parser = configparser.ConfigParser()
    parser.read_string(setup.entry_points())
    assert dict(parser["console_scripts"]) == {"overwire": "overwire._engine:main"}
    for group in ("vllm.general_plugins", "sglang.srt.plugins"):
        ((name, value),) = parser[group].items()
        assert name == "overwire" and callable(EntryPoint(name, value, group).load())


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("# C\n\n## 1.0.0 - 2026-01-01\n", "no section Unreleased"),
        ("# C\n\n## Unreleased\n\n## 1.3.0 - 2026-01-01\n", "has 1.3.0"),
        ("# C\n\n## Unreleased\n\n### Odd\n\n- It.\n", "has Odd under Unreleased"),
    ],
)
def test_a_malformed_changelog_is_refused(text: str, fault: str) -> None:
    """A changelog is refused if it has no Unreleased section, already has an entry for the version, or has an unknown
    section."""
    with pytest.raises(ValueError, match=fault):
        changes.join_changes(text, [("Added", "It.")], "1.3.0", "2026-02-03")
