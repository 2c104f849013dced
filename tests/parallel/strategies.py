"""The ways in which data-parallel ranks share work, by name, and small runs under them."""

import hashlib
from dataclasses import dataclass

from megatron.base.box import flat_boxes
from megatron.config.data import DataConfig
from megatron.config.data_parallel import EVERY, DataParallelSettings
from megatron.config.model import ModelConfig
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.groups import Groups
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.optimizer import ON_DEVICE, Optimizer
from megatron.spec.decoder import decoder_spec
from megatron.training.batch import make_batch
from megatron.training.logging.timers import Timers
from megatron.training.step import TrainStep
from tests import pool
from tests.unit.models.builds import (
    LLAMA,
    assemble,
    make_data_parallel,
    make_ids,
    make_model,
    make_optimizer,
    take_step,
)

STRATEGIES = {
    "plain": {},
    "plain, overlapped": {"overlap_reduce": True},
    "optim": {"shards": "optim"},
    "optim, reduce overlapped": {"shards": "optim", "overlap_reduce": True},
    "optim, gather overlapped": {"shards": "optim", "overlap_gather": True},
    "optim, overlapped": {"shards": "optim", "overlap_reduce": True, "overlap_gather": True},
    "grads": {"shards": "optim_grads", "mode": EVERY, "overlap_reduce": True},
    "grads, overlapped": {"shards": "optim_grads", "mode": EVERY, "overlap_reduce": True, "overlap_gather": True},
    "params": {"shards": "optim_grads_params", "mode": EVERY, "overlap_reduce": True, "overlap_gather": True},
}
# One of each kind, for tests that need not see them all.
FEW = ("plain", "optim", "optim, overlapped", "grads, overlapped", "params")

# A rank's global batch: its samples do not depend on how many ranks there are, for up to 4 ranks and 4 microbatches.
SAMPLES, LENGTH, EOD = 48, 8, 5
LR, DECAY = 5e-3, 0.1


def groups_for(settings, tp=1, holders=1):
    """Process groups of this worker's world with shards as `settings` ask for them."""
    return pool.groups(tp=tp, instances=DataParallelSettings(**settings).optimizer_instances, holders=holders)


@dataclass
class Run:
    """A model in training. decoupled_lr: of the word embeddings and the output layer; None: as of all others."""

    groups: Groups
    model: GPTModel
    data_parallel: DataParallel
    optimizer: Optimizer
    step: TrainStep
    decoupled_lr: float | None = None

    def batches(self, number, accumulation=1):
        """This rank's microbatches of global batch `number`; there are three of them, to be learned by heart."""
        ids = make_ids(SAMPLES, LENGTH, seed=number % 3).chunk(self.groups.dp.size)[self.groups.dp.rank]
        return [make_batch(part, EOD, DataConfig(eod_mask_loss=True)) for part in ids.chunk(accumulation)]

    def steps(self, count, accumulation=1, first=0):
        """Take steps; their losses and gradient norms."""
        numbers = range(first, first + count)
        found = [take_step(self.step, self.batches(n, accumulation), LR, DECAY, self.decoupled_lr) for n in numbers]
        assert all(update.applied for _, update in found)
        return [loss for loss, _ in found], [float(update.grad_norm) for _, update in found]

    def weights(self):
        """As `boxes_of`, when all of the last step has arrived."""
        self.data_parallel.synchronize()
        return boxes_of(self.data_parallel)

    def seen(self):
        """Digest of all parameters as the model's modules hold them now, read the way a layer reads them."""
        read = [getattr(module, name) for module in self.model.modules() for name in module._parameters]
        content = b"".join(tensor.detach().float().numpy().tobytes() for tensor in read if tensor is not None)
        return hashlib.sha256(content).hexdigest()


def parameters_of(data_parallel):
    """Name -> trainable parameter."""
    return {name: p for bucket in data_parallel.buckets for name, p in bucket.parameters.items()}


def boxes_of(data_parallel):
    """[(name, offset, global shape, elements)] of the parameters that this rank owns, in plain arrays."""
    known, found = parameters_of(data_parallel), []
    for piece, elements in data_parallel.weights():
        info, done = known[piece.name].info, 0
        section = info.section_at(piece.start)
        for box in flat_boxes(section.shape, piece.start - section.start, piece.stop - section.start):
            offset = tuple(a + b for a, b in zip(section.offset, box.offset, strict=True))
            part = elements[done : done + box.numel].float().view(box.shape)
            found.append((piece.name, offset, info.spec.shape, part.numpy().copy()))
            done += box.numel
    return found


def whole(ranks):
    """Name -> global tensor from the pieces of all ranks; what several ranks hold is the same, bit for bit."""
    found = assemble(ranks, rtol=0.0, atol=0.0)
    assert not any(tensor.isnan().any() for tensor in found.values()), "a part that no rank owns"
    return found


def make_run(
    settings,
    *,
    fields=LLAMA,
    tp=1,
    sequence_parallel=False,
    bucket_size=3000,
    before=None,
    offload=ON_DEVICE,
    decoupled_lr=None,
    **optimizer,
):
    """Ready for its first step. `before(model)` may change the model before it is put into buckets."""
    holders = decoder_spec(ModelConfig(**fields)).first_core.group_holders(tp)
    groups = groups_for(settings, tp, holders)
    model = make_model(fields, groups, sequence_parallel=sequence_parallel, spread=0.1)
    if before is not None:
        before(model)
    data_parallel = make_data_parallel(model, groups, bucket_size=bucket_size, late_updates=offload.overlap, **settings)
    fp16 = bool(fields.get("fp16"))
    owner = make_optimizer(data_parallel, groups, fp16=fp16, offload=offload, **{"clip_grad": 0.5, **optimizer})
    step = TrainStep(model, data_parallel, owner, groups, Timers(0, lambda: None), per_token=False)
    return Run(groups, model, data_parallel, owner, step, decoupled_lr)
