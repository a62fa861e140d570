"""Between the supervisor's words and those of the wire: actions as commands, reports as events. Pure."""
