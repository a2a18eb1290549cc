"""What every test starts from."""

import mlx.core as mx
import pytest
from hypothesis import settings

# Times are no part of any test here, and the machine may be busy.
settings.register_profile("mlx", deadline=None)
settings.load_profile("mlx")


@pytest.fixture(autouse=True)
def _seeded():
    mx.random.seed(0)
