"""Import MLX before anything else does, and without an interrupt in the middle.

A KeyboardInterrupt while ``mlx.core`` is being set up ends the process by SIGABRT:
nanobind takes it for an error of its own (24 of 400 interrupts in an import, mlx
0.32.4). So it is held back until MLX is there, some 30 ms.
"""

import signal
import threading


def _import() -> None:
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        # On Linux "pip install ." brings no MLX, and "pip install mlx" no backend.
        raise ImportError(
            f"MLX cannot be imported ({error}). Install it: pip install mlx on a Mac; "
            'on Linux with a backend, pip install "mlx[cpu]" (or [cuda12], [cuda13]).'
        ) from error


if hasattr(signal, "pthread_sigmask") and (
    threading.current_thread() is threading.main_thread()
):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        _import()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
else:
    _import()
