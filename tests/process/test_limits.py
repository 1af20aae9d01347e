"""Calls of a process that has reached a limit of the system's: an error, and never the end of the process."""

from __future__ import annotations

from pathlib import Path

from process_helper import run, write_plain


def test_first_calls_without_descriptors(tmp_path: Path) -> None:
    """However few descriptors are left for the first call, it succeeds or raises an OSError; later ones succeed."""
    target = tmp_path / "to" / "b.safetensors"
    target.parent.mkdir()
    source = write_plain(tmp_path / "a.safetensors", {"x": ("U8", [1 << 16], bytes(1 << 16))})
    run(
        """
import resource
import overwire as ow
source, target = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
failed = []
for free in range(12):
    child = os.fork()
    if child == 0:
        taken = []
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
        for number in taken[:free]:
            os.close(number)
        failed = False
        try:
            ow.convert(source, target)
        except OSError:
            failed = True
        for number in taken[free:]:
            os.close(number)
        ow.convert(source, target)
        os._exit(failed)
    failed.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert set(failed) == {0, 1}, failed
assert failed == sorted(failed, reverse=True), failed
assert os.listdir(os.path.dirname(target)) == [os.path.basename(target)]
""",
        source,
        target,
    )
