"""A small decoder in training whose first layers' weights live in far memory, a bucket a layer; on any device."""

from megatron.config.data_parallel import DataParallelSettings
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.memory.copier import ThreadCopier
from megatron.core.memory.far_weights import FarWeights
from tests import pool
from tests.unit.models.builds import differentiate, losses, make_ids, make_model, make_optimizer

LENGTH = 12


class RecordingCopier(ThreadCopier):
    """Also writes down what is asked for, among other `events`."""

    def __init__(self, timeline, events):
        super().__init__(timeline)
        self._events = events

    def out(self, name, moves, block):
        self._events.append(("out", name.split()[-1]))
        return super().out(name, moves, block)

    def back(self, name, moves, block):
        self._events.append(("in", name.split()[-1]))
        return super().back(name, moves, block)


class Run:
    """far, copier: where the weights of the first `layers` layers are, and what moves them, or None to leave them near."""

    def __init__(self, fields, layers, far, copier, device, length=LENGTH):
        self.model, self.far, self.length = make_model(fields, pool.groups(), device=device), far, length
        self.layers = list(self.model.decoder.layers.values())
        names = [name for name, _ in self.model.named_parameters() if _layer(name) in range(layers)]
        settings = DataParallelSettings(bucket_size=sum(p.numel() for p in self.layers[0].parameters()))
        homes = None if copier is None else FarWeights(names, far, copier)
        self.data_parallel = DataParallel(self.model, pool.groups(), settings, device, homes=homes)
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
        self.data_parallel.settle()
        return {piece.name: elements.cpu().clone() for piece, elements in self.data_parallel.weights()}

    def near_bytes(self):
        """Of weights on the device."""
        return sum({s.data_ptr(): s.nbytes() for p in self.model.parameters() if (s := p.untyped_storage())}.values())


def _layer(name):
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["decoder", "layers"] else None
