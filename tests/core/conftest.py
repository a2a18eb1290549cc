"""``pytest -m core`` compiles kernels only for the tests that are about compiling."""

import mlx.core as mx
import pytest


@pytest.fixture(autouse=True)
def _few_kernels(request):
    # A compiler takes most of a second for each of several hundred kernels. The whole
    # suite compiles them.
    is_quick = request.config.option.markexpr == "core"
    if not is_quick or request.node.get_closest_marker("compiles"):
        yield
        return
    mx.disable_compile()
    yield
    mx.enable_compile()
