"""How well the planner predicts published runs."""
