"""Sentences for the user on what a conversion did, and did not."""

from collections.abc import Mapping
from typing import Any

from .layouts import Plan
from .passthrough import entries, schedules, steps_of
from .run import Run
from .sections import moments_in, other_models


def plan_notes(plan: Plan) -> list[str]:
    """Return what the user should know of names and tensors."""
    notes = []
    untied = {e.torch: e.places for e in plan.entries.values() if len(e.places) > 1}
    tied = {alias: name for alias, name in plan.tied.items() if name not in untied}
    if tied:
        said = ", ".join(f"{alias} = {name}" for alias, name in tied.items())
        notes.append(
            f"Tied weights are kept once: {said}. For an MLX model with a parameter of "
            "its own there, give the model (--model)."
        )
    for name, places in untied.items():
        said = " and ".join(", ".join(place) for place in places)
        notes.append(
            f"{name} is one tensor in PyTorch under several names, and {said} are "
            "different parameters in the MLX model: all get its values and its "
            "optimizer state, but they will train apart, and then there is no way "
            "back. To keep them tied, use one array in MLX (embedding.as_linear, say)."
        )
    if any(name.endswith(".lora_a") for e in plan.entries.values() for name in e.mlx):
        notes.append(
            "LoRA adapters of PEFT: mlx-lm multiplies them by the scale in its "
            "adapter_config.json, which must be PEFT's lora_alpha / r (by sqrt(r) with "
            "use_rslora)."
        )
    counters = [n for n in plan.unplaced if n.endswith("num_batches_tracked")]
    if counters:
        notes.append(
            f"{len(counters)} BatchNorm counters (num_batches_tracked) are kept for "
            "the way back; MLX has none, so they will not count its steps."
        )
    dropped = [n for n in plan.unplaced if n not in counters]
    if dropped:
        notes.append(f"Kept only for the way back: {', '.join(dropped)}.")
    return notes


def other_notes(checkpoint: Any, sections: Mapping[str, Any]) -> list[str]:
    """Return what the user should know of further models in a checkpoint."""
    others = other_models(checkpoint, sections)
    if not others:
        return []
    taken = "/".join(map(str, sections["model"]))
    return [
        f"{taken} is taken for the model that was trained. {', '.join(others)}: also "
        "a model, kept for the way back as it is (--model-key takes another)."
    ]


def schedule_notes(run: Run) -> list[str]:
    """Return a word on schedulers, which have no counterpart to convert to."""
    steps = steps_of(run.optimizer or {})
    at = f", the optimizer at step {steps[0]}" if steps else ""
    notes = [
        f"{name}: a PyTorch schedule (last_epoch {epoch}{at}) is kept for the way back "
        "and not run; in MLX give one of the optimizer's step, load_run(folder, model, "
        "learning_rate=lambda step: ...)."
        for name, epoch in schedules(entries(run.record.checkpoint)).items()
    ]
    groups = run.record.optimizer.groups if run.record.optimizer else []
    if any("max_momentum" in group for group in groups):  # OneCycleLR's and CyclicLR's
        notes.append(
            "PyTorch's schedule moves the momentum (or betas[0]) too: in MLX it stays "
            "as it is now, unless you set the optimizer's before each step, in a step "
            "that is not compiled."
        )
    return notes


def moments_notes(skeleton: Any) -> list[str]:
    """Return a word on optimizer states that are in no section."""
    return [
        f"{place}: an optimizer's state that was not converted. It goes back as it "
        "was, beside newer weights: make a new optimizer in PyTorch."
        for place in moments_in(skeleton)
    ]
