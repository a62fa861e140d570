"""distlaunch: one YAML file, one command, and a distributed PyTorch job runs on many machines."""

__version__ = "0.1.0"
