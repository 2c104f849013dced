"""A small decoder in training whose first layers' weights are offloaded, one bucket per layer; on any device."""

from megatron.config.data_parallel import DataParallelSettings
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.offload.copy_engine import CopyEngine
from megatron.core.offload.weights import WeightOffload
from tests import pool
from tests.unit.models.builds import differentiate, losses, make_ids, make_model, make_optimizer

LENGTH = 12


class RecordingEngine(CopyEngine):
    """Also appends every copy to `events`."""

    def __init__(self, streams, events):
        super().__init__(streams)
        self._events = events

    def to_host(self, name, pairs, block, after=None):
        self._events.append(("to host", name.split()[-1]))
        return super().to_host(name, pairs, block, after)

    def to_device(self, name, pairs, block, after=None):
        self._events.append(("to device", name.split()[-1]))
        return super().to_device(name, pairs, block, after)


class Run:
    """pool, engine: where the weights of the first `layers` layers are, and what copies them; engine None: on the
    device."""

    def __init__(self, fields, layers, host_pool, engine, device, length=LENGTH):
        self.model, self.pool, self.length = make_model(fields, pool.groups(), device=device), host_pool, length
        self.layers = list(self.model.decoder.layers.values())
        names = [name for name, _ in self.model.named_parameters() if _layer(name) in range(layers)]
        settings = DataParallelSettings(bucket_size=sum(p.numel() for p in self.layers[0].parameters()))
        offload = None if engine is None else WeightOffload(names, host_pool, engine)
        self.data_parallel = DataParallel(self.model, pool.groups(), settings, device, weight_offload=offload)
        self.optimizer = make_optimizer(self.data_parallel, pool.groups(), clip_grad=1.0)

    def step(self, number, microbatches=2):
        """Losses by microbatch."""
        found = []
        self.data_parallel.begin_step(microbatches)
        for microbatch in range(microbatches):
            ids = make_ids(2, self.length, seed=10 * number + microbatch).to(self.data_parallel.device)
            loss = losses(self.model, ids).sum()
            differentiate(self.data_parallel, loss, last=microbatch == microbatches - 1)
            found.append(loss.item())
        self.data_parallel.finish_reduction()
        self.optimizer.step(1e-3, 0.1)
        return found

    def weights(self):
        """Name -> elements, on the CPU."""
        self.data_parallel.synchronize()
        return {piece.name: elements.cpu().clone() for piece, elements in self.data_parallel.weights()}

    def device_bytes(self):
        """Bytes of weights on the device."""
        return sum({s.data_ptr(): s.nbytes() for p in self.model.parameters() if (s := p.untyped_storage())}.values())


def _layer(name):
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["decoder", "layers"] else None
