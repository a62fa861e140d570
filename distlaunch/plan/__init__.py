"""The plan of a job: nodes, ranks and environments, from a `JobSpec` and facts about nodes. Pure."""
