"""The commands of tools/plan.py."""
