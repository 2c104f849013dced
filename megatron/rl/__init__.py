"""Reinforcement learning: prompts, answers, rewards and the objective."""
