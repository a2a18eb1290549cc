"""``python -m mlx_gradscale.plot``."""

import sys

from .command import main

sys.exit(main())
