"""Reinforcement learning from rewards, and training on preferences, as functions of log-probabilities."""
