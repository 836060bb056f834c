"""Consumer group members of the remote broker: rebalance, pulls, offsets, and queue locks."""
