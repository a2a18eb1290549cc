"""The training core: loss scaling, guarded steps and master weights.

Reading order: ``scale``, ``trees``, ``finite``, ``masters``, ``notices``,
``gradients``, ``optimizers``, ``ranks``, ``guard``, ``scaler``, ``optimizer``.
They do not import the rest of the package.
"""
