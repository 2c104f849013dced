"""Megatron-LM's own checkpoints: torch_dist, and its classic layout mp_rank_XX[_YYY]/model_optim_rng.pt."""
