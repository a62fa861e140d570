"""Who runs where with which rank and environment: pure, from a `JobSpec` and the nodes' facts."""
