"""The training core: loss scaling, skipped steps and master weights.

Reading order: ``scale``, ``trees``, ``finite``, ``masters``, ``notices``, ``forward``,
``gradients``, ``optimizers``, ``ranks``, ``guard``, ``scaler``, ``optimizer``.
Only ``GradScaler.save`` and ``load`` import other parts of the package.
"""
