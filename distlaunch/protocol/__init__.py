"""What goes over a link: the supervisor's wishes as commands, agents' reports as events. Pure."""
