"""The training core: loss scaling, guarded steps and master weights.

Reading order: ``scale``, ``finite``, ``trees``, ``masters``, ``gradients``,
``optimizers``, ``guard``, ``ranks``, ``scaler``, ``optimizer``. Nothing in here imports
the rest of the package.
"""
