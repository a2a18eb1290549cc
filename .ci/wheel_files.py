"""python .ci/wheel_files.py WHEEL SDIST: both have their files, and no others."""

import sys
import tarfile
import zipfile
from pathlib import Path

PACKAGE = "mlx_gradscale"
PROJECT = {"CHANGELOG.md", "LICENSE", "README.md", "SECURITY.md", "pyproject.toml"}
BUILT = {"MANIFEST.in", "PKG-INFO", "setup.cfg"}


def main(wheel, sdist):
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as archive:
        files = [Path(*Path(x.name).parts[1:]) for x in archive if x.isfile()]
    source = {x.as_posix() for x in files if f"{PACKAGE}.egg-info" not in x.parts}
    root = Path(__file__).parent.parent
    here = {path for path in (root / PACKAGE).rglob("*") if path.is_file()}
    here = {path for path in here if "__pycache__" not in path.parts}
    expected = {path.relative_to(root).as_posix() for path in here}
    print(f"{wheel}: {len(inside)} files, {sdist}: {len(source)} files")
    wrong = (inside ^ expected) | (source ^ (expected | PROJECT | BUILT))
    if f"{PACKAGE}/py.typed" not in inside or wrong:
        sys.exit(f"These are missing, or should not be there: {sorted(wrong)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
