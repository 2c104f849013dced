"""What everything else stands on: exceptions, logging, rank arithmetic, the heartbeat, and boxes of global tensors."""
