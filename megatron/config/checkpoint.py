"""Flags of saving and loading."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flag import Need, flag, on_by_default
from megatron.config.interval import COUNT, between
from megatron.config.model import OVERRIDABLE_FIELDS

SAVES = Need(lambda run: run.checkpoint.save is not None, "nothing is saved", "add --save")
_CONTINUES = Need(lambda run: run.checkpoint.may_continue, "nothing is loaded", "add --load or --pretrained-checkpoint")
_HAS_A_BASE = Need(
    lambda run: run.checkpoint.has_base,
    "nothing is loaded",
    "add --load, --pretrained-checkpoint or --load-hf",
)
_KEEPS = Need(
    lambda run: run.checkpoint.non_persistent_save_interval is not None,
    "there are no local checkpoints",
    "add --non-persistent-save-interval",
)
_KEEPS_ON_DISK = Need(
    lambda run: run.checkpoint.non_persistent_ckpt_type == "local",
    "local checkpoints are in memory",
    "add --non-persistent-ckpt-type local",
)
_REPLICATES = Need(lambda run: run.checkpoint.replication, "there are no replicas", "add --replication")
MEMORY = ("memory", "in_memory")  # Megatron-LM has the second name
_LOADS = Need(lambda run: run.checkpoint.load is not None, "nothing is loaded", "add --load")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints are in DIR/iter_0000100/, and DIR/latest_checkpointed_iteration.txt names the newest."""

    save: str | None = flag(None, "folder to save checkpoints in", metavar="DIR")
    save_interval: int | None = flag(
        None,
        "steps between checkpoints; needed with --save",
        aliases=("--persistent-save-interval",),
        within=COUNT,
        needs=SAVES,
    )
    async_save: bool = flag(
        False,
        "write checkpoints in the background: a save copies the tensors to host memory, and a thread writes them while "
        "training goes on. The checkpoint counts when all ranks have written, at the end of a later step",
        needs=SAVES,
    )
    non_persistent_save_interval: int | None = flag(
        None,
        "steps between local checkpoints: every rank keeps its part in the memory or on a disk of its host, in the "
        "background. A restarted job continues from the newest one of which all files still exist on some host, if it is "
        "newer than the checkpoint in --save",
        within=COUNT,
        needs=(SAVES, _CONTINUES),
    )
    non_persistent_ckpt_type: str = flag(
        "memory",
        "where local checkpoints are: in files in the memory of the host (/dev/shm), which outlive the processes but not "
        "the host (memory, in_memory), or in --non-persistent-local-ckpt-dir (local)",
        choices=(*MEMORY, "local", "global"),
        needs=_KEEPS,
    )
    non_persistent_local_ckpt_dir: str | None = flag(
        None,
        "folder for local checkpoints on a disk of each host; {local_rank} in it stands for the number of the rank on "
        "its host",
        metavar="DIR",
        needs=(_KEEPS, _KEEPS_ON_DISK),
    )
    replication: bool = flag(
        False, "keep replicas of local checkpoints on other hosts, so that they survive the loss of one", needs=_KEEPS
    )
    replication_factor: int = flag(
        2,
        "hosts that hold each file of a local checkpoint, that of its rank included",
        within=between(2, 1024),
        needs=(_KEEPS, _REPLICATES),
    )
    replication_jump: int | None = flag(
        None,
        "distance of the ranks that keep replicas for each other; by default the ranks of a host, so that they are on "
        "different hosts",
        within=COUNT,
        needs=(_KEEPS, _REPLICATES),
    )
    ckpt_failure: str = flag(
        "warn",
        "what follows from a save that fails, if an earlier checkpoint is there: training goes on to the next save "
        "(warn), or the run ends (stop). Without an earlier one, and if the last save fails, it ends",
        choices=("warn", "stop"),
        needs=SAVES,
    )
    save_retain: int | None = flag(
        None,
        "keep only this many newest checkpoints, and the best one if evaluations are compared",
        within=COUNT,
        needs=SAVES,
    )
    load: str | None = flag(None, "folder to continue from; a new run if it holds no checkpoint", metavar="DIR")
    pretrained_checkpoint: str | None = flag(
        None,
        "folder of a checkpoint whose weights to start from, as with --finetune, while --load (without it: --save) "
        "holds no checkpoint of this run",
        metavar="DIR",
    )
    load_hf: str | None = flag(
        None,
        "start from the weights of this Hugging Face model; its config.json gives the model's shape, its tokenizer is "
        "used unless another is given. A checkpoint in --load takes precedence, so that a run can be started again",
        metavar="DIR",
    )
    load_adapter: str | None = flag(
        None,
        "continue with the LoRA adapter in this PEFT folder on the model of --load-hf, --pretrained-checkpoint "
        "or --load; its adapter_config.json gives rank, alpha and projections. A checkpoint of this run takes "
        "precedence",
        metavar="DIR",
    )
    save_hf: str | None = flag(
        None, "write every checkpoint to DIR/iter_0000100 in Hugging Face format, too", metavar="DIR", needs=SAVES
    )
    ckpt_step: int | None = flag(None, "load this iteration instead of the newest", within=COUNT, needs=_LOADS)
    exit_on_missing_checkpoint: bool = flag(
        False, "stop if --load holds no checkpoint, instead of starting a new run", needs=_LOADS
    )
    finetune: bool = flag(
        False, "load weights only and start at iteration 0 with new optimizer, data and random state", needs=_LOADS
    )
    save_optim: bool = on_by_default(when_off="do not save the optimizer's state", needs=SAVES)
    save_rng: bool = on_by_default(when_off="do not save the random state", needs=SAVES)
    load_optim: bool = on_by_default(when_off="start with a new optimizer state", needs=_CONTINUES)
    load_rng: bool = on_by_default(when_off="start with a new random state", needs=_CONTINUES)
    use_checkpoint_args: bool = flag(
        False,
        "take the model's shape from the checkpoint; then flags set only --vocab-size and --override-model-fields",
        needs=_CONTINUES,
    )
    override_model_fields: tuple[str, ...] = flag(
        (),
        "fields of the model in which this run may differ from the checkpoint or the Hugging Face model that it loads, "
        "such as rope_scaling_factor to extend the context; a log line names both values. Without it a difference is "
        "refused",
        choices=OVERRIDABLE_FIELDS,
        nargs="+",
        metavar="FIELD",
        needs=_HAS_A_BASE,
    )

    def takes(self, field: str) -> bool:
        """Whether a flag for a field of the model counts where the shape comes from a file: its vocabulary can grow."""
        return field == "vocab_size" or field in self.override_model_fields

    @property
    def replicas(self) -> int:
        """The hosts that hold each file of a local checkpoint."""
        return self.replication_factor if self.replication else 1

    @property
    def has_base(self) -> bool:
        """Whether the run may begin with a model that exists."""
        return self.may_continue or self.load_hf is not None

    @property
    def may_continue(self) -> bool:
        """Whether the run may find progress of its own to continue from."""
        return self.load is not None or self.pretrained_checkpoint is not None
