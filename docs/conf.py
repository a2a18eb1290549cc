"""The documentation site: ``sphinx-build -W --keep-going docs build/site``.

Sphinx, because MLX's own documentation is made with it and because it takes the API
reference from the docstrings. The pages are Markdown, so that they also read well where
the repository is shown, and so that one small test can run their code.
"""

import os
import re
from pathlib import Path

import mlx_gradscale

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

project = "mlx_gradscale"
release = version = mlx_gradscale.__version__
project_copyright = "the authors of mlx_gradscale"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]

html_theme = "furo"
html_title = f"mlx_gradscale {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
# Those of the pictures, so that a dark one has no edge.
html_theme_options = {
    "dark_css_variables": {
        "color-background-primary": "#0d1117",
        "color-background-secondary": "#161b22",
    }
}
# Code of both themes with a contrast of 4.5 or more, which most styles do not have.
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
# What a scaler and a wrapper have for each other and for other rooms, not for users.
OUR_OWN = (
    *("after_step", "after_update", "belong_to", "check_model", "check_optimizer"),
    *("gives_true_gradients", "has_no_gradients", "inverse", "is_between_iterations"),
    *("kept_masters", "owner", "ranks", "refuse_stages", "take_way", "warn_once"),
)
autodoc_default_options = {
    "members": True,
    "exclude-members": ", ".join(OUR_OWN),
    # What a class takes from ours is shown, what it takes from Python or MLX is not.
    "inherited-members": "Optimizer, BaseException, tuple, dict, object",
}
maximum_signature_line_length = 70
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes as a short list

# These pages are files at the top of the repository, where people look for them.
TOP_PAGES = {
    "architecture": ROOT / "ARCHITECTURE.md",
    "benchmarks": ROOT / "benchmarks" / "README.md",
    "changelog": ROOT / "CHANGELOG.md",
    "contributing": ROOT / "CONTRIBUTING.md",
    "security": ROOT / "SECURITY.md",
}

_PICTURE = re.compile(
    r'<picture>\s*<source[^>]*srcset="(?P<dark>[^"]+)"[^>]*>\s*(?P<image><img[^>]*>)'
    r"\s*</picture>"
)


def _both_pictures(text: str, folder: Path, page: Path) -> str:
    """Show the one or the other, as the reader's choice of theme on the site is."""

    def shown(found: re.Match) -> str:
        alt, light = (
            re.search(rf'{name}="([^"]*)"', found["image"])[1]
            for name in ("alt", "src")
        )
        return "\n\n".join(
            f":::{{image}} {os.path.relpath(folder / path, page)}\n"
            f":class: only-{theme}\n:alt: {alt}\n:::"
            for theme, path in (("light", light), ("dark", found["dark"]))
        )

    return _PICTURE.sub(shown, text)


def _relink(text: str, folder: Path, page: Path) -> str:
    """Lead links between files of the repository to the pages of these files."""

    def relinked(found: re.Match) -> str:
        name, hash_, anchor = found["target"].partition("#")
        file = (folder / name).resolve()
        if name and file in TOP_PAGES.values():
            file = DOCS / next(n for n, f in TOP_PAGES.items() if f == file)
            file = file.with_suffix(".md")
        elif not name or not file.exists():
            return found[0]
        return f"[{found['text']}]({os.path.relpath(file, page)}{hash_}{anchor})"

    return re.sub(r"\[(?P<text>[^]]*)\]\((?P<target>[^)\s]+)\)", relinked, text)


def read_page(app, docname: str, source: list[str]) -> None:
    """Make of a file of the repository what Sphinx needs."""
    text, page = source[0], (DOCS / docname).parent
    folder = page
    if docname in TOP_PAGES:
        text, folder = TOP_PAGES[docname].read_text(), TOP_PAGES[docname].parent
    text = _relink(text, folder, page)
    source[0] = _both_pictures(text, folder, page)


def readable_signature(app, what, name, obj, options, signature, returns):
    """Write a dataclass's defaults as Python: Sphinx parses no ``<factory>``."""
    return signature and signature.replace("<factory>", "..."), returns


def setup(app) -> None:
    app.connect("source-read", read_page)
    app.connect("autodoc-process-signature", readable_signature)
