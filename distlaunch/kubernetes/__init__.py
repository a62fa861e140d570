"""A job as manifests for a Kubernetes cluster: one launcher in each pod, `distlaunch torchrun`."""
