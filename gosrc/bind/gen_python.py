"""Write the Python side of the engine's tables: overwire/_verbs.py, _requests.py,
_tables.py, and the generated classes of errors.py.

Run by `make gen`; with a folder as the argument the files go there instead, as a test
asks that compares them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python/overwire"
MARKS = r"(# By `make gen`[^\n]*\n).*?(# End of what is generated\.\n)"


def main(out: Path) -> None:
    tool = out / "gen-tables"
    subprocess.run(["go", "build", "-o", str(tool), "./gosrc/bind/gen"], cwd=ROOT, env=dict(os.environ, CGO_ENABLED="1"), check=True)
    try:
        parts = ("verbs", "requests", "tables", "errors")
        texts = {part: subprocess.run([tool, part], stdout=subprocess.PIPE, text=True, check=True).stdout for part in parts}
    finally:
        tool.unlink()
    for part in ("verbs", "requests", "tables"):
        (out / f"_{part}.py").write_text(texts[part])
    errors = (PACKAGE / "errors.py").read_text()
    errors, marks = re.subn(MARKS, lambda found: found[1] + texts["errors"] + "\n\n" + found[2], errors, flags=re.S)
    if marks != 1:
        sys.exit("gen: errors.py has lost its marks")
    (out / "errors.py").write_text(errors)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else PACKAGE)
