"""``python -m mlx_gradscale.lora``."""

import sys

from .command import main

sys.exit(main())
