"""Megatron-LM's own checkpoints in its classic layout: mp_rank_XX[_YYY]/model_optim_rng.pt."""
