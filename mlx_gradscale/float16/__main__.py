"""``python -m mlx_gradscale.float16``."""

import sys

from .command import main

sys.exit(main())
