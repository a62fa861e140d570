"""Kubernetes manifests for a job, with one launcher (`distlaunch torchrun`) in each pod."""
