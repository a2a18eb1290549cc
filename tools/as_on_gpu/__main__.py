"""``python -m tools.as_on_gpu``: see README.md."""

import sys

from . import main

sys.exit(main(sys.argv[1:]))
