"""``python -m mlx_gradscale.convert``."""

import sys

from .command import main

sys.exit(main())
