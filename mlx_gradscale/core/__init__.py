"""The training core: loss scaling, skipped steps and master weights.

Reading order: ``scale`` (the rule), ``trees``, ``fusion``, ``masters``, ``eight_bit``,
``notices``, ``finite``, ``intercept``, ``forward``, ``gradients`` (and the loss),
``optimizers``, ``ranks``, ``guard`` (the update of a parameter), ``scaler`` (a step),
``state``, ``optimizer``. Only ``GradScaler.save`` and ``load`` import other parts of
the package. A step, for every kind of optimizer, is ``GradScaler._step``: match
gradients to parameters, inspect them, update each parameter, advance the scale, commit.

The words of this package:

- A gradient is *scaled* when it comes from the backward pass of the scaled loss, and
  *unscaled* after it has been divided by the scale, in float32. A *lazy* gradient is an
  unscaled one that still knows the scaled array it came from. *Inverse* is 1 / scale.
- A *leaf* of a tree is an array in it; a ``Leaf`` is a gradient with its parameter, and
  a ``Row`` is what the update of a parameter reads. A *slot* or *place* is where an
  array is: path, container (*box*) and key. A *write* is a container, a key and a new
  value.
- A step is *applied* or *skipped*. It is *planned* first and then *committed*.
- A *wrapper* is a ``MasterWeightOptimizer``, of which ``LossScaleOptimizer`` is a
  subclass, and the optimizer in it is the *inner* one.
  Every optimizer that a scaler steps, plain or wrapped, is a *participant*. *Parts* are
  the optimizers in a ``MultiOptimizer``.
- A *master weight* is the float32 value of a half-precision parameter. What is *stored*
  for it in the state is the value and the bits of the weight, or a remainder.
- An *iteration* is everything between two calls of ``update()``. A *stage* records the
  progress of one optimizer within an iteration.
"""
