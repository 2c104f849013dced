"""Memory against time: what is recomputed, and what waits in far memory."""
