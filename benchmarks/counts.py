"""The counts that have to hold everywhere: kernels, traces, bytes."""

import gc

import mlx.core as mx

from mlx_gradscale.finite import all_finite_times

from . import trees, variants
from .counting import kernels, peak_bytes
from .rows import Figure, Section
from .variants import ELEMENTWISE, OPTIMIZERS

# A half and a whole: what grows from one to the other is per leaf.
_FEW, _MANY = 64, 128
# Where the CPU's thread is slow enough that MLX allocates all outputs ahead, so
# that the peak is the same in every run.
_MEMORY_SHAPES = [(500, 500)] * 16


def measure() -> Section:
    """Count everything."""
    return Section(figures=[*kernel_figures(), *trace_figures(), *memory_figures()])


def kernel_figures() -> list[Figure]:
    """Kernels per leaf of the guarded update, and of the check before it."""
    found = [
        Figure(
            f"kernels per leaf / bare, {name}",
            update_kernels_per_leaf(name) / bare_kernels_per_leaf(name),
            bar=1.0,
            counted=True,
        )
        for name in ELEMENTWISE
    ]
    check = _per_leaf(check_kernels)
    return [
        *found,
        Figure("kernels per leaf, finite check", check, bar=0.25, counted=True),
    ]


def bare_kernels_per_leaf(name: str) -> float:
    """Kernels that each further leaf costs the bare optimizer."""
    return _per_leaf(
        lambda shapes: kernels(variants.bare(OPTIMIZERS[name], shapes).start()).total()
    )


def update_kernels_per_leaf(name: str) -> float:
    """Kernels that each further leaf costs with the scaler, without the check."""

    def update(shapes: trees.Shapes) -> int:
        phase = variants.scaler(OPTIMIZERS[name], shapes)
        return kernels(phase.start()).total() - check_kernels(shapes)

    return _per_leaf(update)


def check_kernels(shapes: trees.Shapes) -> int:
    """Kernels with which a step looks whether a tree is finite."""
    return kernels([all_finite_times(trees.make(shapes), mx.array(1.0))]).total()


def _per_leaf(count) -> float:
    few, many = count([(8, 8)] * _FEW), count([(8, 8)] * _MANY)
    return (many - few) / (_MANY - _FEW)


def trace_figures() -> list[Figure]:
    """Traces of a compiled step over applied and skipped steps."""
    makers = {
        "GradScaler": variants.scaler,
        "LossScaleOptimizer": variants.loss_scale_optimizer,
    }
    return [
        Figure(f"traces, {name}", traces(make), bar=1, counted=True)
        for name, make in makers.items()
    ]


def traces(make) -> int:
    """Run applied, skipped and applied steps; return how often it was traced."""
    phase = make(OPTIMIZERS["AdamW"], [(8, 8)] * 4)
    good, bad = phase.gradients, trees.with_inf(phase.gradients)
    for gradients in (good, bad, bad, good, good):
        phase.gradients = gradients
        phase.run()
    return phase.traces


def memory_figures() -> list[Figure]:
    """Peak bytes of a compiled step against the bare optimizer's."""
    bare = _peak(variants.bare)
    scaled = _peak(variants.scaler)
    note = f"{scaled / 1e6:.1f} MB against {bare / 1e6:.1f} MB"
    return [
        Figure("peak memory / bare", scaled / bare, bar=1.02, counted=True, note=note)
    ]


def _peak(make) -> int:
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    phase = make(OPTIMIZERS["AdamW"], _MEMORY_SHAPES)
    return peak_bytes(phase.run) - before
