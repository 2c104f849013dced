"""The mixture-of-experts layer: router, experts, shared experts, and the balance between experts."""
