"""The process groups that Megatron-LM's flags name, and ours that have their tasks."""

from __future__ import annotations

# Megatron-LM's name -> names in core/groups.py; an empty tuple where no group is needed here. The wider ones come
# first. Buckets of gradients and parameters travel in `shard`, `gather` and `replicas`, messages between stages in `up`
# and `down`, and tokens of experts in `etp_ep`.
GROUPS: dict[str, tuple[str, ...]] = {
    "dp": ("dp",),
    "dp_cp": ("dp_cp", "shard", "gather", "replicas"),
    "intra_dp_cp": ("shard", "gather"),
    "cp": ("cp",),
    "hcp": ("cp_inner", "cp_outer"),
    "mp": ("model",),
    "tp": ("tp", "tp_inner"),
    "pp": ("pp", "up", "down"),
    "embd": ("ends",),
    "pos_embd": (),
    "tp_dp_cp": (),
    "tp_dp": (),
    "tp_cp": ("tp_cp",),
    "ep": ("ep", "etp_ep"),
    "ep_tp": ("etp",),
    "tp_ep_mp": ("etp_ep",),
    "tp_ep_pp": (),
    "ep_dp": ("edp", "expert_shard", "expert_gather", "expert_replicas"),
    "intra_ep_dp": ("expert_shard", "expert_gather"),
    "inter_ep_dp": ("expert_replicas",),
    "intra_dist_opt_instance": (),
}
