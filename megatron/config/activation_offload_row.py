"""What the start-up table says about the offload of activations and weights."""

from __future__ import annotations

from megatron.config.pipeline import pipeline_settings
from megatron.config.run import RunConfig
from megatron.schedule.offload_pass import moved_groups, with_offload

_LAYERS_THAT_STAY = 2  # of a stage, where layers move one by one


def activation_offload_row(run: RunConfig, microbatches: int) -> tuple[str, str, str]:
    """(asked, in effect, why) of a step of so many microbatches. Pure."""
    offload = run.activation_offload
    if offload.kind is None:
        return "off", "off", ""
    if offload.kind == "layers":
        asked = f"first {offload.cpu_offloading_num_layers} layers of a stage"
        return asked, asked, ""
    if offload.kind == "modules":
        asked = " ".join(offload.offload_modules or ())
        return asked, asked, f"in all layers but a stage's last {_LAYERS_THAT_STAY}"
    asked = "auto" if offload.ratio is None else f"{offload.ratio:g} of the bytes"
    where, why = _where_a_ratio_works(run, microbatches)
    if where and offload.ratio is None:
        return asked, "off at first", f"decided after the second step, and logged; {where}"
    return asked, f"{asked}: {where}" if where else "off", why


def weight_offload_row(run: RunConfig) -> tuple[str, str, str]:
    """(asked, in effect, why). Pure."""
    count = run.activation_offload.far_weight_layers
    if not count:
        return "off", "off", ""
    directory = run.optimizer_offload.offload_dir
    asked = f"first {count} layer{'s' if count > 1 else ''} of a stage"
    return asked, f"{asked}: in {f'files in {directory}' if directory else 'host memory'}", ""


def _where_a_ratio_works(run: RunConfig, microbatches: int) -> tuple[str, str]:
    """How much of the pipeline moves what, or "" and why nothing does."""
    assert run.model.num_layers
    settings = pipeline_settings(run.parallel, run.model.num_layers)
    schedule = with_offload(settings.schedule_of(microbatches))
    ranks, most = len(schedule.actions), max(len(stage.layers) for stage in settings.stages)
    whole = sum(bool(moved_groups(actions)) for actions in schedule.actions)
    if not whole and most <= _LAYERS_THAT_STAY:
        return "", f"a stage has {most} layers, which its backward needs at once"
    by_layer = f"all but the last {_LAYERS_THAT_STAY} of a stage, one by one"
    if not whole:
        return f"layers, {by_layer}", ""
    here = "" if whole == ranks else f" on {whole} of {ranks} ranks"
    rest = f"; where a backward follows sooner layers, {by_layer}" if most > _LAYERS_THAT_STAY else ""
    return f"whole microbatches{here}{rest}", ""
