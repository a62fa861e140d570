"""What a scheduler has given the command that runs inside it: hosts, GPUs, an end."""
