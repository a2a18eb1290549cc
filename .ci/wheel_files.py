"""python .ci/wheel_files.py WHEEL: the package's files are in it, and only they."""

import sys
import zipfile
from pathlib import Path

PACKAGE = "mlx_gradscale"


def main(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    root = Path(__file__).parent.parent
    here = {path for path in (root / PACKAGE).rglob("*") if path.is_file()}
    here = {path for path in here if "__pycache__" not in path.parts}
    expected = {path.relative_to(root).as_posix() for path in here}
    print(f"{wheel}: {len(inside)} files")
    if f"{PACKAGE}/py.typed" not in inside or inside != expected:
        sys.exit(f"These should be in both: {sorted(inside ^ expected)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
