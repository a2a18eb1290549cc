"""The step count of Transformers' Trainer, ``trainer_state.json``, on the way back."""

from collections.abc import Mapping
from typing import Any

from .passthrough import steps_of
from .run import Run
from .torch_folder import TRAINER


def move_trainer(run: Run, step: int | None = None) -> list[str]:
    """Set a Trainer's ``global_step``, and its ``epoch`` with it, to where the run is.

    ``Trainer(resume_from_checkpoint=)`` skips as much of its data as these say. Where
    it had counted as many steps as the optimizer, it has now, too. Where not, as after
    skipped steps or in a record that was edited, nothing is known and it stays.

    Args:
        run (Run): On its way to PyTorch; its record is changed.
        step (int, optional): The step to set. Default: the optimizer's.

    Returns:
        list: Sentences for the user.

    Example:
        >>> from mlx_gradscale.convert.record import Record
        >>> state = {"global_step": 10, "epoch": 0.5}
        >>> run = Run(record=Record({"trainer_state.json": state}))
        >>> move_trainer(run, 15)
        ['trainer_state.json: global_step 10 is now 15, epoch 0.5 is now 0.75.']
    """
    checkpoint = run.record.checkpoint
    state = checkpoint.get(TRAINER) if isinstance(checkpoint, Mapping) else None
    if not isinstance(state, Mapping) or type(state.get("global_step")) is not int:
        if step is not None and not run.record.is_pattern:
            raise ValueError(
                f"--step {step}: to PyTorch it sets the global_step of {TRAINER}, and "
                "this run has none."
            )
        return []
    was = state["global_step"]
    now = _counted(run, was) if step is None else step
    if now < 0:
        raise ValueError(f"--step must be 0 or more, not {now}.")
    if now == was:
        return []
    moved: dict[str, Any] = {"global_step": now}
    epoch: Any = state.get("epoch")
    if type(epoch) in (int, float) and was > 0:
        moved["epoch"] = epoch * now / was
    checkpoint[TRAINER] = {**state, **moved}
    run.record.moved = (TRAINER,)
    said = ", ".join(f"{k} {state[k]:g} is now {v:g}" for k, v in moved.items())
    return [f"{TRAINER}: {said}."]


def _counted(run: Run, was: int) -> int:
    """Return the optimizer's count, if it was the Trainer's when the run came."""
    start = run.record.optimizer.steps if run.record.optimizer else ()
    now = steps_of(run.optimizer or {})
    alike = len(set(now)) == 1 and set(start) == {was} and not run.record.is_pattern
    return now[0] if alike else was
