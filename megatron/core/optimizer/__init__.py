"""Mixed-precision optimizers, clipping and schedules over gradient buffers."""
