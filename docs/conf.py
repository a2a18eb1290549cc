"""The documentation site: ``sphinx-build -W --keep-going docs build/site``.

The pages are Markdown, so that they also read well in the repository and so that a test
can run their code. The API reference comes from the docstrings.
"""

import os
import re
from pathlib import Path

import mlx_gradscale

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
# The address of the repository, which GitHub gives to the workflow that builds the
# site. Elsewhere it is not known.
SERVER, NAME = map(os.environ.get, ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY"))
REPOSITORY = f"{SERVER}/{NAME}" if NAME else ""

project = "mlx_gradscale"
release = version = mlx_gradscale.__version__
project_copyright = "the mlx_gradscale contributors"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]

html_theme = "furo"
html_title = f"mlx_gradscale {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
# The background of the pictures, so that a dark one has no edge.
html_theme_options = {
    "dark_css_variables": {
        "color-background-primary": "#0d1117",
        "color-background-secondary": "#161b22",
    }
}
pygments_style = "default"
pygments_dark_style = "github-dark"
toc_object_entries_show_parents = "hide"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {
    "members": True,
    # Inherited from classes of this package, not from MLX's or Python's.
    "inherited-members": "Optimizer, BaseException, tuple, dict, object",
    "exclude-members": "main",
}
maximum_signature_line_length = 70
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# Pages that are files at the top of the repository.
TOP_PAGES = {
    "architecture": ROOT / "ARCHITECTURE.md",
    "changelog": ROOT / "CHANGELOG.md",
    "contributing": ROOT / "CONTRIBUTING.md",
    "security": ROOT / "SECURITY.md",
}

# The groups of the sidebar. They are not in index.md, where GitHub would show them.
SIDEBAR = {
    "Getting started": "getting_started bfloat16 coming_from troubleshooting",
    "Guides": "mlx_lm trainers own_loop checkpoints pytorch_runs distributed "
    "skipped_steps float32_layers diagnostics performance",
    "API": "api/index api/gradscaler api/loss_scale_optimizer api/functions "
    "api/diagnostics api/plot api/distributed api/ema api/float32_layers api/convert "
    "api/torch_checkpoint",
    "Project": "changelog security contributing architecture",
}

# Defaults as a reader would write them.
DEFAULTS = {
    "rule.SMALLEST_SCALE": "2**-64",
    "rule.LARGEST_SCALE": "2**64",
    "<factory>": "...",
}

_PICTURE = re.compile("<img[^>]*>")
_LINK = re.compile(r"(?<!!)\[(?P<text>[^]]*)\]\((?P<target>[^)\s]+)\)")


def _replace_pictures(text: str, folder: Path, page: Path) -> str:
    """Turn <img> into an image that Sphinx copies."""

    def replace(found: re.Match) -> str:
        attributes = dict(re.findall(r'(\w+)="([^"]*)"', found[0]))
        return (
            f":::{{image}} {os.path.relpath(folder / attributes['src'], page)}\n"
            f":alt: {attributes['alt']}\n:width: {attributes['width']}px\n:::"
        )

    return _PICTURE.sub(replace, text)


def _replace_links(text: str, folder: Path, page: Path) -> str:
    """Link to pages of the site, or else to the repository if its address is known."""

    def replace(found: re.Match) -> str:
        name, hash_, anchor = found["target"].partition("#")
        file = (folder / name).resolve()
        if not name or "://" in name or not file.exists():
            return found[0]
        if file in TOP_PAGES.values():
            pages = {path: name for name, path in TOP_PAGES.items()}
            file = DOCS / f"{pages[file]}.md"
        elif DOCS not in file.parents:
            if not REPOSITORY:
                return found["text"]
            address = f"{REPOSITORY}/blob/main/{file.relative_to(ROOT)}{hash_}{anchor}"
            return f"[{found['text']}]({address})"
        return f"[{found['text']}]({os.path.relpath(file, page)}{hash_}{anchor})"

    return _LINK.sub(replace, text)


def read_page(app, docname: str, source: list[str]) -> None:
    """Prepare a Markdown file of the repository for Sphinx."""
    text, page = source[0], (DOCS / docname).parent
    folder = page
    if docname in TOP_PAGES:
        text, folder = TOP_PAGES[docname].read_text(), ROOT
    text = _replace_links(text, folder, page)
    source[0] = _replace_pictures(text, folder, page)
    if docname == "index":
        for group, names in SIDEBAR.items():
            source[0] += f"\n\n:::{{toctree}}\n:caption: {group}\n:hidden:\n\n"
            source[0] += "\n".join(names.split()) + "\n:::"


def show_defaults(app, what, name, obj, options, signature, returns):
    """Write the defaults in a signature as a reader would."""
    for found, shown in DEFAULTS.items():
        signature = signature and signature.replace(found, shown)
    return signature, returns


def add_summary(app, what, name, obj, options, lines: list[str]) -> None:
    """Start the page of a module with a table of its names."""
    names = [x for x in getattr(obj, "__all__", []) if callable(getattr(obj, x))]
    if what == "module" and names:
        # Functions first, because most classes are results of functions.
        names.sort(key=lambda each: each[0].isupper())
        names = [f"   {each}" for each in names if each != "main"]
        lines += ["", ".. autosummary::", "   :nosignatures:", "", *names, ""]


def setup(app) -> None:
    app.connect("source-read", read_page)
    app.connect("autodoc-process-signature", show_defaults)
    app.connect("autodoc-process-docstring", add_summary)
